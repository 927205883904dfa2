"""Connections between Baton's own processes: numbered, sealed messages over TCP.

A frame is four bytes of length, big-endian, and a sealed message (`transfer.control.seal`). What a message may be is
said by the kind of connection: that of a replica and an ingress (`link.wire`), that to the session manager
(`manager.wire`). A message that this version does not know, as in a rolling update, is told apart from an illegal one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import msgspec

from transfer.control.seal import BadMessage, SealOf

logger = logging.getLogger("baton.connection")

_LENGTH_BYTES = 4
FIRST_BYTES = 4096
"""The largest message from a peer that has not shown the seal yet."""
SILENT_AFTER_S, PROBES = 4, 3
"""TCP probes a connection that was silent for `SILENT_AFTER_S` seconds, `PROBES` times. A dead host is found after some
ten seconds."""

M = TypeVar("M")
Seal = SealOf[msgspec.Raw]
_ENCODER = msgspec.msgpack.Encoder()


def packed(message: Any) -> msgspec.Raw:
    """A message, encoded."""
    return msgspec.Raw(_ENCODER.encode(message))


def unpacked(body: msgspec.Raw, known: msgspec.msgpack.Decoder[M], otherwise: msgspec.msgpack.Decoder[M]) -> M:
    """The message, or what `otherwise` makes of one that is not known. Raises BadMessage when both fail."""
    try:
        return known.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    try:
        return otherwise.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"a frame that fits no message: {error}") from error


def framed(sealed: bytes) -> bytes:
    """A sealed message as it goes over the connection."""
    return len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed


class Frames:
    """Puts sealed messages together again from the bytes that come over a connection. `most_bytes`: of a message."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are whole now. Raises BadMessage for one that claims to be longer than `most_bytes`."""
        self._bytes += data
        at = 0
        try:
            while len(self._bytes) - at >= _LENGTH_BYTES:
                length = int.from_bytes(self._bytes[at : at + _LENGTH_BYTES], "big")
                if length > self.most_bytes:
                    raise BadMessage(f"a frame of {length} bytes")
                end = at + _LENGTH_BYTES + length
                if len(self._bytes) < end:
                    return
                frame, at = bytes(self._bytes[at + _LENGTH_BYTES : end]), end
                yield frame
        finally:
            del self._bytes[:at]


class Connection(asyncio.Protocol, Generic[M]):
    """One end of a connection: messages to bytes and back. A peer that sends an illegal message is cut off.

    The end that connects greets the other with a small message. The end that accepts takes no larger one before it has
    seen the seal on it: what is not of the cluster cannot make it hold much.
    """

    _transport: asyncio.Transport

    def __init__(
        self, seal: Seal, message_of: Callable[[msgspec.Raw], M], peer: str, greeting: Any | None = None
    ) -> None:
        """`message_of`: the message in a body; raises BadMessage. `peer`: what is at the other end, for the log.

        `greeting`: the message that the end that connects sends first; None: this end accepts.
        """
        self._seal, self._message_of, self._peer, self._greeting = seal, message_of, peer, greeting
        self._frames = Frames(FIRST_BYTES if greeting is None else seal.most_bytes)

    def take(self, message: M) -> None:
        """Take in a message. Raises BadMessage when the other side may not send such a message."""
        raise NotImplementedError

    def send(self, message: Any) -> None:
        """Send a message, unless the connection is closing."""
        if not self._transport.is_closing():
            self._transport.write(framed(self._seal.pack(packed(message))))

    def close(self) -> None:
        """Close the connection when everything is sent; idempotent."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _tune(transport)
        if self._greeting is not None:
            self.send(self._greeting)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                body = self._seal.unpack(frame)
                self._frames.most_bytes = self._seal.most_bytes
                self.take(self._message_of(body))
        except BadMessage as error:
            logger.warning("%s was cut off: %s", self._peer, error)
            self.close()


def address_of(server: asyncio.Server, host: str) -> str:
    """Where a server listens, as `connect` takes it: `host:port`."""
    port = server.sockets[0].getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


C = TypeVar("C", bound=asyncio.BaseProtocol)


async def connect(address: str, new: Callable[[], C]) -> C:
    """A connection to `host:port`. Raises OSError."""
    host, _, port = address.rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(new, host.strip("[]"), int(port))
    return connection


def _tune(transport: asyncio.BaseTransport) -> None:
    """Have TCP send small messages at once, and find out when the other host is gone."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", SILENT_AFTER_S), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
