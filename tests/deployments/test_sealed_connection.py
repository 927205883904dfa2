"""Frames on a connection: put together from any pieces, and never longer than they may be."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.sealed_connection import FIRST_BYTES, Connection, Frames, address_of, connect, framed
from transfer.control.seal import BadMessage, SealOf


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50))
def test_frames_are_put_together_from_any_pieces(messages: list[bytes], piece: int) -> None:
    sent = b"".join(map(framed, messages))
    frames = Frames(99)
    found = [frame for at in range(0, len(sent), piece) for frame in frames.feed(sent[at : at + piece])]
    assert found == messages


class End(Connection[Any]):
    """One end; what it takes in is in `taken`."""

    def __init__(self, greeting: Any | None) -> None:
        super().__init__(
            SealOf("a secret", msgspec.Raw, 1_000_000, b"test"), msgspec.msgpack.decode, "a peer", greeting
        )
        self.taken: list[Any] = []
        self.lost = asyncio.Event()

    def take(self, message: Any) -> None:
        self.taken.append(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


async def test_only_a_peer_that_has_shown_the_seal_may_send_large_messages() -> None:
    accepted: list[End] = []

    def accept() -> End:
        accepted.append(End(None))
        return accepted[-1]

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    address = address_of(server, "127.0.0.1")
    known = await connect(address, lambda: End("hello"))
    known.send("x" * 100_000)
    async with asyncio.timeout(60):
        while not (accepted and len(accepted[0].taken) == 2):
            await asyncio.sleep(0.002)
    assert accepted[0].taken == ["hello", "x" * 100_000]
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write((FIRST_BYTES + 1).to_bytes(4, "big"))
    assert await asyncio.wait_for(reader.read(), 60) == b"", "cut off before its message is there"
    writer.close()
    known.close()
    await asyncio.wait_for(accepted[0].lost.wait(), 60)
    server.close()


def test_a_frame_that_is_too_long_is_refused_before_it_is_there() -> None:
    frames = Frames(10)
    assert list(frames.feed(framed(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(BadMessage, match="a frame of 11 bytes"):
        list(frames.feed(framed(b"x" * 11)[:5]))
