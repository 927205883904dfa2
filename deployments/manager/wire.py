"""What goes between the session manager and its callers on the wire: messages, and the frames that they travel in.

A frame is four bytes of length, big-endian, and a sealed message (`transfer.control.seal`). Every call has a number,
which its answer repeats; numbers are the connection's own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from deployments.messages import ManagerView, Placement, Reject, ReplicaSnapshot, ReportAnswer, SessionRequest
from transfer.control.seal import BadMessage, SealOf

logger = logging.getLogger("baton.manager")

MAX_BYTES = 64 * 1024 * 1024
"""Of a message. The largest is a view of the whole fleet, or a replica's whole prefix cache: ten bytes a block."""
_LENGTH_BYTES = 4
_PURPOSE = b"session-manager"
SILENT_AFTER_S, PROBES = 4, 3
"""A host that has gone without a word is found out by TCP's own probes, after some ten seconds."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything on the wire."""

    number: int


class Open(Message, frozen=True):
    request: SessionRequest


class PrefillDone(Message, frozen=True):
    session_id: str
    epoch: int


class Close(Message, frozen=True):
    session_id: str
    epoch: int
    outcome: str
    output_tokens: int | None
    ended: bool


class Lost(Message, frozen=True):
    replica_id: str
    gone: bool


class Silent(Message, frozen=True):
    replica_ids: tuple[str, ...]


class View(Message, frozen=True):
    after_s: float


class Report(Message, frozen=True):
    snapshot: ReplicaSnapshot


class Ready(Message, frozen=True):
    pass


class Status(Message, frozen=True):
    pass


class Cancel(Message, frozen=True):
    """The caller waits no more for the answer to this number. There will be none."""


class Placed(Message, frozen=True):
    placement: Placement


class Rejected(Message, frozen=True):
    reject: Reject


class Told(Message, frozen=True):
    pass


class SilentOnes(Message, frozen=True):
    replica_ids: tuple[str, ...]


class Viewed(Message, frozen=True):
    view: ManagerView


class Heeded(Message, frozen=True):
    answer: ReportAnswer


class Shown(Message, frozen=True):
    shown: dict[str, Any]


class Failed(Message, frozen=True):
    """The call raised."""

    why: str


class Leaving(Message, frozen=True):
    """Another manager takes over: what is asked from now on is to be asked there. Answers no call."""


Call = Open | PrefillDone | Close | Lost | Silent | View | Report | Ready | Status
Answer = Placed | Rejected | Told | SilentOnes | Viewed | Heeded | Shown | Failed
AnyMessage = Call | Cancel | Answer | Leaving


def seal(secret: str) -> SealOf[AnyMessage]:
    """What both sides encode and authenticate with."""
    return SealOf[AnyMessage](secret, AnyMessage, MAX_BYTES, _PURPOSE)


def framed(sealed: bytes) -> bytes:
    """A sealed message as it goes over the connection."""
    return len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed


class Frames:
    """Puts the sealed messages together again from the bytes that a connection gives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that have come whole. Raises BadMessage when one says that it is longer than any."""
        self._bytes += data
        at = 0
        try:
            while len(self._bytes) - at >= _LENGTH_BYTES:
                length = int.from_bytes(self._bytes[at : at + _LENGTH_BYTES], "big")
                if length > MAX_BYTES:
                    raise BadMessage(f"a frame of {length} bytes")
                end = at + _LENGTH_BYTES + length
                if len(self._bytes) < end:
                    return
                frame, at = bytes(self._bytes[at + _LENGTH_BYTES : end]), end
                yield frame
        finally:
            del self._bytes[:at]


class Connection(asyncio.Protocol):
    """One end of a connection: sealed messages to bytes and back. Who says what it may not is cut off."""

    _transport: asyncio.Transport

    def __init__(self, sealed: SealOf[AnyMessage], peer: str) -> None:
        """`peer`: who is at the other end, for the log."""
        self._seal, self._frames, self._peer = sealed, Frames(), peer

    def take(self, message: AnyMessage) -> None:
        """A message has come. Raises BadMessage when the other side does not say such things."""
        raise NotImplementedError

    def send(self, message: AnyMessage) -> None:
        """Send it, unless the connection is closing."""
        if not self._transport.is_closing():
            self._transport.write(framed(self._seal.pack(message)))

    def close(self) -> None:
        """Close it when everything is sent; idempotent."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _tune(transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self.take(self._seal.unpack(frame))
        except BadMessage as error:
            logger.warning("%s was cut off: %s", self._peer, error)
            self.close()


def _tune(transport: asyncio.BaseTransport) -> None:
    """Small messages at once, and a host that is gone found out."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", SILENT_AFTER_S), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
