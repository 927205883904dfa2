"""The decode workers that a prefill worker may write to: which introductions it accepts, and which ones it forgets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.transfer.channel.wire_peer import BLOCKS, KEY, Peer, offer, prefill_all
from transfer.channel.decode_peers import DecodePeers
from transfer.channel.outbox import Outbox
from transfer.control import messages as control
from transfer.control.messages import Failed, Hello, Landed, Refused, Welcome
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.layout import KVLayout
from transfer.memory.plane import PlaneError


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


MEMORY = np.zeros(4 * 64, dtype=np.uint8)


class Wire:
    """An endpoint that notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, control.AnyMessage]] = []

    def send(self, to: Any, message: control.AnyMessage) -> None:
        self.sent.append((to, message))


class Table:
    """The peers of a prefill worker, without a channel."""

    def __init__(self, warm_up_s: float = 60.0) -> None:
        wire: Any = Wire()
        self.wire, self.plane, self.outbox = wire, InProcessPlane(f"prefill-{id(self)}"), Outbox()
        self.layout = KVLayout(1, 1, 4, 16, 64, (int(MEMORY.ctypes.data),))
        self.peers = DecodePeers(self.plane, self.layout, wire, self.outbox, warm_up_s)

    def hello(self, **unlike: Any) -> Hello:
        return Hello("tcp://d", "d", self.plane.metadata(), dataclasses.replace(self.layout, **unlike))


@pytest.fixture
def registered() -> Iterator[None]:
    """The memory of the decode worker `d`."""
    plane = InProcessPlane("d")
    plane.register(Table().layout)
    yield
    plane.close()


def test_a_worker_that_was_refused_is_refused_for_good_with_the_first_reason(registered: None) -> None:
    table = Table()
    assert table.peers.hello(b"one", table.hello(block_size=32)) == []
    assert table.peers.hello(b"one", table.hello()) == []
    reason = Refused("block_size differs: 16 here, 32 there")
    assert table.wire.sent == [(b"one", reason)] * 2
    assert table.outbox.counts["messages_refused"] == 2
    assert table.peers.agents == {}


def test_a_reason_is_cut_to_what_a_message_may_carry() -> None:
    table = Table()
    table.peers.refuse(b"one", "x" * (control.REASON_CHARS + 1))
    assert table.wire.sent == [(b"one", Refused("x" * control.REASON_CHARS))]


def test_the_transport_is_driven_while_a_connection_is_made_or_closed(registered: None) -> None:
    table, later = Table(warm_up_s=60.0), time.monotonic() + 59.0
    assert not table.peers.is_active(later)
    table.peers.hello(b"one", table.hello())
    assert table.peers.is_active(later)
    assert not table.peers.is_active(time.monotonic() + 61.0)


@pytest.mark.parametrize("busy", [(), (b"one",)], ids=["idle", "busy"])
def test_a_worker_that_is_no_longer_listed_is_forgotten_unless_it_is_busy(
    registered: None, busy: tuple[bytes, ...]
) -> None:
    table = Table()
    table.plane.register(table.layout)
    table.peers.hello(b"one", table.hello())
    table.peers.keep([["tcp://d", "tcp://its second worker"]], ())
    table.peers.keep([], busy)
    assert set(table.peers.agents) == set(busy)
    table.peers.keep([], ())
    assert table.peers.agents == {}
    with pytest.raises(PlaneError, match="no connection"):
        table.plane.write("d", 0, [0], [0])
    table.plane.close()
