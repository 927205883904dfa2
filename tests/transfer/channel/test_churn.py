"""Peers that come and go leave nothing behind."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from transfer.control.endpoint import Endpoint
from transfer.control.messages import FirstToken, Seal
from transfer.control.token_sender import TokenSender

SEAL = Seal("a secret of the tests")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number is wanted


@pytest.fixture
def sender() -> Iterator[TokenSender]:
    made = TokenSender(SEAL, connections=3)
    yield made
    made.close()


@pytest.fixture
def inbox() -> Iterator[zmq.Socket[bytes]]:
    """A decode worker's endpoint, under many addresses: every port of 127.0.0.0/8 leads to it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.bind_to_random_port("tcp://0.0.0.0")
        yield socket


def addresses(inbox: zmq.Socket[bytes], count: int) -> list[str]:
    _, _, port = inbox.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")
    return [f"tcp://127.0.{number // 256}.{number % 256}:{port}" for number in range(1, count + 1)]


def test_a_worker_may_have_many_peers(inbox: zmq.Socket[bytes]) -> None:
    endpoint = Endpoint("decode", SEAL, "127.0.0.1")
    for address in addresses(inbox, 400):
        assert endpoint.connect(address)
    assert len(endpoint.peers) == 400
    endpoint.close()


@pytest.mark.slow
def test_200_peers_leave_a_channel_as_it_was(prefill: Any, make_side: Callable[..., Any]) -> None:
    """Each decode replica is met, gets a handoff and goes: every second with its process, the others by name only."""
    at_start = None
    for number in range(200):
        decode = make_side(f"decode-{number}", plane=None)
        address, name = decode.channel.address, str(number)
        decode.channel.meet([[prefill.channel.address]])
        prefill.channel.keep([[address]])
        decode.channel.offer((name, 1), name, [prefill.channel.address], 0, [1], False)
        prefill.save((name, 1), name, 4, 4, [2])
        prefill.channel.ended((name, 1), name, True)
        assert decode.wait("received", name) is None
        assert prefill.wait("released", name)
        if number % 2:
            decode.channel.close()
        else:
            decode.channel.meet([])
            decode.until(lambda decode=decode: not decode.channel._endpoint.peers)
        prefill.channel.keep([])
        prefill.until(lambda: not prefill.channel._prefill.peers.agents)
        decode.channel.close()
        if number == 9:
            at_start = threading.active_count(), descriptors()
    assert at_start is not None
    prefill.until(lambda: threading.active_count() <= at_start[0] and descriptors() <= at_start[1])
    assert not prefill.channel._prefill.peers._plane._peers
    assert not prefill.channel._prefill._handoffs


def test_200_meetings_of_one_pair_leave_it_as_it_was(prefill: Any, decode: Any) -> None:
    peers, at_start = [[prefill.channel.address]], 0
    for number in range(200):
        known = set(prefill.channel._prefill.peers.agents)
        decode.channel.meet(peers)
        prefill.until(lambda known=known: set(prefill.channel._prefill.peers.agents) - known)
        assert len(prefill.channel._prefill.peers.agents) == 1
        decode.channel.meet([])
        decode.until(lambda: not decode.channel._endpoint.peers)
        at_start = at_start or descriptors()
        if number % 2:  # otherwise it comes back before it is forgotten
            prefill.channel.keep([[decode.channel.address]])
            prefill.channel.keep([])
            prefill.until(lambda: not prefill.channel._prefill.peers.agents)
    prefill.until(lambda: descriptors() <= at_start)
    assert len(prefill.channel._prefill.peers._plane._peers) <= 1


def test_a_token_sender_forgets_who_was_sent_to_longest_ago(sender: TokenSender, inbox: zmq.Socket[bytes]) -> None:
    for number, address in enumerate(addresses(inbox, 200)):
        sender.send(address, FirstToken("s", 1, number))
        assert len(sender._sockets) <= 3
        assert SEAL.unpack(inbox.recv_multipart()[-1]) == FirstToken("s", 1, number)
    kept = addresses(inbox, 200)[-3:]
    assert list(sender._sockets) == kept
    sender.send(kept[0], FirstToken("s", 1, 0))
    assert list(sender._sockets) == [*kept[1:], kept[0]]
    assert len(sender._context._sockets) == 3


def test_connections_to_workers_that_are_no_more_are_closed(
    sender: TokenSender, inbox: zmq.Socket[bytes], no_leaks: None
) -> None:
    one, another, new = addresses(inbox, 3)
    for address in (one, another):
        sender.send(address, FirstToken("s", 1, 1))
    sender.keep([one, another])
    sender.keep([one])
    assert list(sender._sockets) == [one]
    sender.send(new, FirstToken("s", 1, 2))
    sender.send(another, FirstToken("s", 1, 3))
    sender.keep([one])  # nobody has heard of the new one yet
    assert new in sender._sockets
    sender.keep([one, new])
    assert set(sender._sockets) == {one, new}, "what was sent to one that was gone already"
    sender.keep([])
    assert not sender._sockets


def test_a_token_for_what_is_no_address_is_lost_and_no_error(
    sender: TokenSender, inbox: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "baton.transfer"):
        sender.send("nonsense", FirstToken("s", 1, 1))
    assert "nonsense is lost" in caplog.text
    sender.send(addresses(inbox, 1)[0], FirstToken("s", 1, 2))
    assert SEAL.unpack(inbox.recv_multipart()[-1]) == FirstToken("s", 1, 2)


def test_a_worker_that_is_gone_is_tried_ever_more_seldom(sender: TokenSender, inbox: zmq.Socket[bytes]) -> None:
    address = addresses(inbox, 1)[0]
    sender.send(address, FirstToken("s", 1, 1))
    socket = sender._sockets[address]
    first, longest = (int(socket.getsockopt(each)) for each in (zmq.RECONNECT_IVL, zmq.RECONNECT_IVL_MAX))
    assert first < longest
