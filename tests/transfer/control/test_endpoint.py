"""A control endpoint alone: its peers, and whose messages it takes."""

from __future__ import annotations

import zmq

from tests.transfer.control.inboxes import addresses
from transfer.control.endpoint import TAKE_AT_ONCE, Endpoint
from transfer.control.messages import Seal, Welcome

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
