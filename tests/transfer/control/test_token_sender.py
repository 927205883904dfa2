"""The sender of first tokens: its connections, and tokens that cannot be sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import zmq

from tests.transfer.control.inboxes import addresses
from transfer.control.endpoint import Endpoint, Incoming
from transfer.control.messages import FirstToken, Seal
from transfer.control.token_sender import TokenSender

SEAL = Seal("a secret of the tests")


@pytest.fixture
def sender() -> Iterator[TokenSender]:
    made = TokenSender(SEAL, connections=3)
    yield made
    made.close()


def test_a_token_sender_forgets_the_worker_that_it_sent_to_longest_ago(
    sender: TokenSender, inbox: zmq.Socket[bytes]
) -> None:
    for number, address in enumerate(addresses(inbox, 200)):
        sender.send(address, FirstToken("s", 1, number))
        assert len(sender._sockets) <= 3
        assert SEAL.unpack(inbox.recv_multipart()[-1]) == FirstToken("s", 1, number)
    kept = addresses(inbox, 200)[-3:]
    assert list(sender._sockets) == kept
    sender.send(kept[0], FirstToken("s", 1, 0))
    assert list(sender._sockets) == [*kept[1:], kept[0]]
    assert len(sender._context._sockets) == 3


def test_a_token_goes_to_a_worker_whose_endpoint_tells_its_layers(
    sender: TokenSender, inbox: zmq.Socket[bytes]
) -> None:
    sender.send(f"{addresses(inbox, 1)[0]}#layers=0:15", FirstToken("s", 1, 7))
    assert SEAL.unpack(inbox.recv_multipart()[-1]) == FirstToken("s", 1, 7)


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
    sender.keep([one])  # the new one was never listed
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


def test_a_token_reaches_an_endpoint_of_either_family(sender: TokenSender, host: str) -> None:
    endpoint = Endpoint("decode", SEAL, host)
    sender.send(endpoint.address, FirstToken("s", 1, 7))
    assert [each.message for each in endpoint.poll(10_000) if isinstance(each, Incoming)] == [FirstToken("s", 1, 7)]
    endpoint.close()
