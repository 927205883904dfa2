"""How much, how often and how late a peer may offer and cancel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.transfer.channel.wire_peer import BLOCKS, KEY, Peer, offer, prefill_all
from transfer.control.messages import Cancel, Failed, Landed, Welcome


@pytest.mark.parametrize("blocks", [(), (-1,), (BLOCKS,), (0, 2**60), (*range(BLOCKS), 0)], ids=lambda b: b[-2:])
def test_only_blocks_that_there_are_can_be_offered(prefill: Any, peer: Peer, blocks: tuple[int, ...]) -> None:
    answer = peer.ask(offer(blocks=blocks))
    assert isinstance(answer, Failed)
    assert "blocks" in answer.reason
    assert prefill.counter("open_writing") == 0
    assert prefill.counter("messages_refused") == 1
    assert peer.ask(offer()) == answer, "its blocks were given back, and another offer may be an older one"


def test_offers_to_prefills_that_do_not_come_are_bounded(prefill: Any, decode: Any, peer: Peer) -> None:
    """A worker cannot have offered more blocks than it has; others are not in its way."""
    for number in range(10 * BLOCKS):
        peer.say(offer((f"never {number}", 1), blocks=(0,)))
    refused = [peer.hear() for _ in range(9 * BLOCKS)]
    assert {answer.reason for answer in refused if isinstance(answer, Failed)} == {
        "more blocks are offered than the peer has"
    }
    assert prefill.counter("open_writing") == BLOCKS
    decode.channel.offer(KEY, "d", [prefill.channel.address], 0, [1, 2], False)
    prefill_all(prefill)
    assert decode.wait("received", "d") is None


def test_a_repeated_offer_is_no_second_offer_and_buys_no_time(prefill: Any, peer: Peer) -> None:
    peer.say(peer.hello, offer(blocks=tuple(range(BLOCKS))))
    assert peer.hear() == Welcome()
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    begun = prefill.channel._prefill._handoffs[KEY].deadline
    for blocks in ((1, 2), (), (-5,)):
        peer.say(offer(blocks=blocks))
    prefill.barrier()
    assert prefill.channel._prefill._handoffs[KEY].deadline == begun
    prefill.run_out()
    assert peer.hear() == Failed(*KEY, "the handoff ran out of time")


def test_a_cancel_after_the_end_is_answered_again(prefill: Any, peer: Peer) -> None:
    """The first answer may have been lost, and the blocks are held until there is one."""
    peer.say(offer())
    prefill.save(KEY, "p", 8, 8, [5, 6])
    assert peer.hear() == Landed(*KEY)
    assert peer.ask(Cancel(*KEY, 0, "late")) == Landed(*KEY)
    prefill.channel.ended(KEY, "p", True)
    assert prefill.wait("released", "p")
    assert isinstance(peer.ask(Cancel(*KEY, 0, "later")), Failed)
    assert prefill.counter("handoffs_landed") == 1


def test_one_worker_cancels_and_the_other_runs_out_of_time(prefill: Any) -> None:
    """Two decode workers share one prefill worker, and the prefill never begins."""
    peers = [Peer(prefill.channel.address, prefill.layout, rank=rank, workers=2) for rank in (0, 1)]
    for rank, peer in enumerate(peers):
        peer.say(peer.hello, offer(rank=rank))
        assert peer.hear() == Welcome()
    prefill.until(lambda: len(prefill.channel._prefill._handoffs[KEY].readers) == 2)
    assert peers[1].ask(Cancel(*KEY, 1, "aborted")) == Failed(*KEY, "aborted")
    prefill.run_out()
    assert peers[0].hear() == Failed(*KEY, "the handoff ran out of time")
    prefill.wait_idle()
    prefill.collect()
    for peer in peers:
        peer.close()
