"""Which side, and which worker, may send which message: nothing else ends another worker's handoff."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.transfer.channel.wire_peer import KEY, FakePrefill, Peer, offer, prefill_all
from transfer.control import messages as control
from transfer.control.messages import Cancel, Failed, Landed, Refused, Welcome


@pytest.mark.parametrize("message", [Landed(*KEY), Failed(*KEY, ""), Welcome(), Refused("")], ids=str)
def test_what_prefill_says_is_not_heard_by_prefill(prefill: Any, peer: Peer, message: control.AnyMessage) -> None:
    peer.say(offer(), message)
    prefill.wait_counter("messages_refused", 1)
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)


@pytest.mark.parametrize("message", [offer(), Cancel(*KEY, 0, "")], ids=["offer", "cancel"])
def test_what_decode_says_is_not_heard_by_decode(
    decode: Any, fake_prefill: FakePrefill, message: control.AnyMessage
) -> None:
    decode.channel.offer(KEY, "d", [fake_prefill.address], 0, [1], False)
    identity = fake_prefill.accept()
    fake_prefill.say(identity, Peer.seal.pack(message))
    decode.wait_counter("messages_refused", 1)
    assert not decode.collect().broken
    fake_prefill.say(identity, Peer.seal.pack(Landed(*KEY)))
    assert decode.wait("received", "d") is None


@pytest.mark.parametrize("message", [Landed(*KEY), Failed(*KEY, "not mine")], ids=["landed", "failed"])
def test_a_prefill_worker_ends_its_own_handoffs_only(
    prefill: Any, decode: Any, fake_prefill: FakePrefill, message: control.AnyMessage
) -> None:
    decode.channel.meet([[fake_prefill.address], [prefill.channel.address]])
    identity = fake_prefill.accept()
    decode.channel.offer(KEY, "d", [prefill.channel.address], 0, [1, 2], False)
    fake_prefill.say(identity, Peer.seal.pack(message))
    decode.wait_counter("messages_refused", 1)
    assert not decode.collect().broken
    assert not decode.results.received
    prefill_all(prefill)
    assert decode.wait("received", "d") is None


def test_an_offer_before_the_introduction_is_refused(prefill: Any, make_peer: Callable[..., Peer]) -> None:
    stranger = make_peer()
    assert isinstance(stranger.ask(offer()), Refused)
    assert prefill.counter("open_writing") == 0
    assert isinstance(stranger.ask(stranger.hello), Refused), "it has been told that nothing will be written"
    stranger.socket = stranger.dial()
    assert stranger.ask(stranger.hello) == Welcome()
    stranger.say(offer())
    prefill_all(prefill)
    assert stranger.hear() == Landed(*KEY)


def test_a_cancel_before_the_introduction_is_answered_and_ends_nothing(
    prefill: Any, peer: Peer, make_peer: Callable[..., Peer]
) -> None:
    peer.say(offer())
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    stranger = make_peer()
    assert isinstance(stranger.ask(Cancel(*KEY, 0, "mine")), Refused)
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)


@pytest.mark.parametrize("message", [offer(blocks=(63, 62)), Cancel(*KEY, 0, "mine")], ids=["offer", "cancel"])
def test_a_handoff_belongs_to_the_worker_that_offered_first(
    prefill: Any, peer: Peer, make_peer: Callable[..., Peer], message: control.AnyMessage
) -> None:
    """Its blocks are checked against its own layout, and its answer is the one that frees them."""
    peer.say(offer())
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    other = make_peer()
    assert other.ask(other.hello) == Welcome()
    assert other.ask(message) == Failed(*KEY, "another worker has offered its blocks")
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert prefill.wait("released", "p")
    assert not other.memory.any()


@pytest.mark.parametrize("rank", [-1, 1, 2**40])
def test_only_ones_own_part_can_be_offered_or_cancelled(prefill: Any, peer: Peer, rank: int) -> None:
    for message in (offer(rank=rank), Cancel(*KEY, rank, "")):
        answer = peer.ask(message)
        assert isinstance(answer, Failed)
        assert "another worker's name" in answer.reason
    peer.say(offer())
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert prefill.wait("released", "p"), "not held for a worker that does not exist"


@pytest.mark.parametrize("is_late", [False, True], ids=["before the prefill", "during the prefill"])
def test_a_worker_of_a_wider_replica_does_not_hold_the_source(
    prefill: Any, peer: Peer, make_peer: Callable[..., Peer], is_late: bool
) -> None:
    """The prefill is for a replica of one worker, and here comes the second of two."""
    second = make_peer(rank=1, workers=2)
    assert second.ask(second.hello) == Welcome()
    peer.say(offer())
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    if is_late:
        prefill.save(KEY, "p", 4, 8, [5, 6])
        prefill.barrier()
        assert isinstance(second.ask(offer(rank=1)), Failed)
    else:
        second.say(offer(rank=1))
        prefill.until(lambda: len(prefill.channel._prefill._handoffs[KEY].readers) == 2)
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert prefill.wait("released", "p")
