"""Engine outputs on their way from replicas to an ingress: order, what breaks a connection, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from deployments.output_stream import OutputReceiver, OutputSender

WAIT_S = 30.0
NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture
def sender(no_leaks: None) -> Iterator[OutputSender]:
    made = OutputSender("prefill-0", lease_s=10.0)
    yield made
    made.close()
    made.close()


@pytest.fixture
async def receiver(host: str) -> OutputReceiver:
    return OutputReceiver(host)


async def test_messages_arrive_in_order_and_name_their_replica(sender: OutputSender, receiver: OutputReceiver) -> None:
    assert await sender.connect(receiver.address)
    for number in range(100):
        assert sender.send(receiver.address, [b"%d" % number, b"more"])
    for number in range(100):
        arrived = await asyncio.wait_for(receiver.receive(), WAIT_S)
        assert arrived == ("prefill-0", [b"%d" % number, b"more"])
    receiver.close()
    receiver.close()


async def test_an_ingress_is_connected_once(sender: OutputSender, receiver: OutputReceiver) -> None:
    assert await asyncio.gather(*(sender.connect(receiver.address) for _ in range(3))) == [True] * 3
    assert list(sender._sockets) == [receiver.address]
    sockets = [each for each in sender._context._sockets if not each.closed]
    assert len(sockets) == 1
    receiver.close()


async def test_an_ingress_that_is_not_there_is_not_connected() -> None:
    sender = OutputSender("prefill-0", lease_s=0.1)
    assert not await sender.connect(NOWHERE)
    assert not sender.send(NOWHERE, [b"lost"])
    assert sender.drop_gone() == []
    assert not [each for each in sender._context._sockets if not each.closed]
    sender.close()


async def test_an_ingress_that_is_gone_is_dropped_and_takes_no_more(
    sender: OutputSender, receiver: OutputReceiver
) -> None:
    assert await sender.connect(receiver.address)
    assert sender.drop_gone() == []
    receiver.close()
    gone: list[str] = []
    async with asyncio.timeout(WAIT_S):
        while not gone:
            await asyncio.sleep(0.01)
            gone = sender.drop_gone()
    assert gone == [receiver.address]
    assert not sender.send(receiver.address, [b"lost"])


async def test_a_broken_connection_is_not_made_again(sender: OutputSender, tmp_path: Path) -> None:
    """The messages in it are lost, and an answer must not go on after a gap."""
    address = f"ipc://{tmp_path}/ingress"
    with zmq.Context() as context:
        with context.socket(zmq.PULL) as first:
            first.bind(address)
            assert await sender.connect(address)
        async with asyncio.timeout(WAIT_S):
            while sender.send(address, [b"in the gap"]):
                await asyncio.sleep(0.01)
        with context.socket(zmq.PULL) as second:
            second.bind(address)
            await asyncio.sleep(0.5)  # ZeroMQ's own reconnecting takes a tenth of a second
            assert not sender.send(address, [b"after the gap"])
            assert sender.drop_gone() == [address]
            assert await sender.connect(address)
            assert sender.send(address, [b"new"])
            assert second.recv_multipart() == [b"prefill-0", b"new"]
