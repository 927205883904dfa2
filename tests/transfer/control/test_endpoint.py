"""A control endpoint alone: its peers, and whose messages it takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.transfer.control.inboxes import addresses
from transfer.control.endpoint import TAKE_AT_ONCE, Endpoint, Incoming, PeerGone
from transfer.control.messages import FirstToken, Landed, Seal, Welcome

SEAL = Seal("a secret of the tests")


def test_a_flood_on_one_connection_leaves_the_others_their_turn() -> None:
    endpoint = Endpoint("flooded", SEAL, "127.0.0.1")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint.address)
        for _ in range(2 * TAKE_AT_ONCE + 1):
            socket.send(SEAL.pack(Welcome()))
        taken = 0
        while taken < 2 * TAKE_AT_ONCE + 1:
            events = endpoint.poll(10_000)
            assert 0 < len(events) <= TAKE_AT_ONCE
            taken += len(events)
    endpoint.close()


def test_a_worker_may_have_many_peers(inbox: zmq.Socket[bytes]) -> None:
    endpoint = Endpoint("decode", SEAL, "127.0.0.1")
    for address in addresses(inbox, 400):
        assert endpoint.connect(address)
    assert len(endpoint.peers) == 400
    endpoint.close()


Make = Callable[..., Endpoint]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Endpoint] = []

    def endpoint(name: str, seal: Seal = SEAL, host: str = "127.0.0.1") -> Endpoint:
        made.append(Endpoint(name, seal, host))
        return made[-1]

    yield endpoint
    for each in made:
        each.close()
        each.close()


def events_of(endpoint: Endpoint, count: int = 1) -> list[Any]:
    """The next events; poll returns none when a socket has news of its own only."""
    events: list[Any] = []
    for _ in range(1000):
        events += endpoint.poll(10_000)
        if len(events) >= count:
            return events
    raise AssertionError(events)


def test_a_message_is_answered_on_its_connection(make: Make, host: str) -> None:
    prefill, decode = make("prefill", host=host), make("decode", host=host)
    assert decode.connect(prefill.address)
    decode.send(prefill.address, FirstToken("s", 1, 7))
    (asked,) = events_of(prefill)
    assert asked.message == FirstToken("s", 1, 7)
    prefill.send(asked.sender, Landed("s", 1))
    assert events_of(decode) == [Incoming(prefill.address, Landed("s", 1))]


def test_a_peer_that_closes_is_gone_once_and_may_be_connected_again(make: Make) -> None:
    prefill, other, decode = make("prefill"), make("other"), make("decode")
    for peer in (prefill, other):
        assert decode.connect(peer.address)
        decode.send(peer.address, Welcome())
        events_of(peer)
    prefill.close()
    assert events_of(decode) == [PeerGone(prefill.address)]
    assert decode.peers == {other.address}
    assert decode.connect(prefill.address)


def test_a_peer_that_is_not_there_is_gone(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode")
    prefill.close()
    assert decode.connect(prefill.address)
    assert events_of(decode) == [PeerGone(prefill.address)]
    assert decode.connect("nonsense") is False
    assert decode.poll(None) == [PeerGone("nonsense")], "it is here, so there is no wait"
    assert decode.peers == set()


def test_a_peer_is_connected_once(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode")
    assert decode.connect(prefill.address)
    assert not decode.connect(prefill.address)
    decode.disconnect(prefill.address)
    decode.disconnect(prefill.address)
    assert decode.peers == set()
    assert decode.connect(prefill.address)


def test_a_message_to_a_peer_that_is_gone_is_lost_silently(make: Make) -> None:
    endpoint = make("prefill")
    endpoint.send(b"an identity of no connection", Welcome())
    endpoint.send("tcp://127.0.0.1:1", Welcome())


def test_a_message_under_another_seal_is_counted_and_those_after_it_are_taken(make: Make) -> None:
    prefill, stranger, decode = make("prefill"), make("stranger", Seal("other")), make("decode")
    for peer in (stranger, decode):
        peer.connect(prefill.address)
    stranger.send(prefill.address, FirstToken("s", 1, 1))
    while not prefill.bad_messages:
        assert prefill.poll(10_000) == []
    decode.send(prefill.address, FirstToken("s", 1, 2))
    assert [each.message for each in events_of(prefill)] == [FirstToken("s", 1, 2)]
    assert prefill.bad_messages == 1


def test_a_watched_descriptor_ends_a_poll_without_an_event(make: Make) -> None:
    endpoint = make("prefill")
    descriptor = os.eventfd(1)
    endpoint.watch(descriptor)
    assert endpoint.poll(None) == []
    os.close(descriptor)
