"""The decode workers that a prefill worker may write to: which introductions it accepts, and which ones it forgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from tests.transfer.channel.wire_peer import BLOCKS, KEY, Peer, offer, prefill_all
from transfer.control.messages import Failed, Landed, Refused, Welcome


def test_a_second_introduction_changes_nothing(prefill: Any, peer: Peer) -> None:
    assert peer.ask(peer.hello) == Welcome()
    unlike = msgspec.structs.replace(peer.hello, layout=dataclasses.replace(peer.layout, num_blocks=4))
    renamed = msgspec.structs.replace(peer.hello, agent="other")
    peer.say(unlike, renamed, offer(blocks=(62, 63)))
    prefill.wait_counter("messages_refused", 2)
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert len(prefill.channel._prefill.peers.agents) == 1


def test_an_agent_is_not_taken_over(prefill: Any, peer: Peer, make_peer: Callable[..., Peer]) -> None:
    thief = make_peer()
    hello = msgspec.structs.replace(peer.hello, layout=thief.layout)
    assert isinstance(thief.ask(hello), Refused)
    peer.say(offer())
    prefill_all(prefill)
    assert peer.hear() == Landed(*KEY)
    assert not thief.memory.any()


def test_memory_that_is_not_registered_is_refused(make_peer: Callable[..., Peer]) -> None:
    liar = make_peer()
    elsewhere = tuple(base + (1 << 40) for base in liar.layout.bases)
    for layout in (
        dataclasses.replace(liar.layout, bases=elsewhere),
        dataclasses.replace(liar.layout, num_blocks=BLOCKS + 1),
    ):
        answer = liar.ask(msgspec.structs.replace(liar.hello, layout=layout))
        assert isinstance(answer, Refused)
        assert "registered" in answer.reason


def test_a_new_connection_of_a_worker_ends_what_was_on_the_old_one(prefill: Any, peer: Peer) -> None:
    """Decode gave its blocks back when it lost the connection."""
    peer.say(offer())
    prefill.until(lambda: prefill.channel.is_answered(KEY))
    peer.socket = peer.dial()
    peer.say(peer.hello)
    assert {type(peer.hear()), type(peer.hear())} == {Failed, Welcome}
    prefill_all(prefill)
    assert prefill.wait("released", "p")
    assert prefill.counter("writes") == 0
    assert len(prefill.channel._prefill.peers.agents) == 1
    again = ("again", 1)
    peer.say(offer(again))
    prefill_all(prefill, again, "p2")
    assert peer.hear() == Landed(*again)


def test_a_worker_that_was_forgotten_comes_back_by_itself(prefill: Any, decode: Any) -> None:
    decode.channel.meet([[prefill.channel.address]])
    prefill.until(lambda: prefill.channel._prefill.peers.agents)
    prefill.channel.keep([[decode.channel.address]])
    prefill.channel.keep([])
    prefill.until(lambda: not prefill.channel._prefill.peers.agents)
    decode.channel.offer(KEY, "first", [prefill.channel.address], 0, [1, 2], False)
    assert "not known" in decode.wait("broken", "first")
    decode.channel.offer(("next", 1), "next", [prefill.channel.address], 0, [1, 2], False)
    prefill_all(prefill, ("next", 1))
    assert decode.wait("received", "next") is None
