"""How calls of the session manager and their answers travel: numbered messages, and the frames that carry them.

A frame is four bytes of length, big-endian, and a sealed message (`transfer.control.seal`). Each connection numbers its
calls, and an answer repeats its call's number. Calls and answers are encoded inside the message, so that a call or an
answer which the other side does not know, as in a rolling update, fails alone and not with its connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from deployments.manager import calls
from deployments.manager.calls import A, Answer, AnyCall, Call
from deployments.messages import Admit, ManagerView, Placement, Reject, ReportAnswer
from transfer.control.seal import BadMessage, SealOf

logger = logging.getLogger("baton.manager")

MAX_BYTES = 64 * 1024 * 1024
"""The largest size of a message. The largest messages are a view of the whole fleet and a replica's whole prefix cache,
at ten bytes a block."""
_LENGTH_BYTES = 4
_PURPOSE = b"session-manager"
SILENT_AFTER_S, PROBES = 4, 3
"""TCP probes a connection that was silent for `SILENT_AFTER_S` seconds, `PROBES` times. A dead host is found after some
ten seconds."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything on the wire."""

    number: int


class Asked(Message, frozen=True):
    """A caller's call, encoded."""

    call: msgspec.Raw


class Cancel(Message, frozen=True):
    """The caller no longer waits for the answer to this call. The call gets no answer."""


class Answered(Message, frozen=True):
    """A call's answer, encoded."""

    answer: msgspec.Raw


class Failed(Message, frozen=True):
    """The call raised, or the manager does not know it."""

    why: str


class Retiring(Message, frozen=True):
    """Another manager takes over, and new calls must go to it. The number is 0, because this answers no call."""


class Unknown(msgspec.Struct, frozen=True):
    """A message of another version, of which only the number is known."""

    number: int


AnyMessage = Asked | Cancel | Answered | Failed | Retiring


class Placed(msgspec.Struct, frozen=True, tag=True):
    """`Admit` on the wire."""

    placement: Placement


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """`Reject` on the wire."""

    reject: Reject


_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES = msgspec.msgpack.Decoder(AnyMessage)
_UNKNOWN = msgspec.msgpack.Decoder(Unknown)
_CALLS = msgspec.msgpack.Decoder(AnyCall)
_TOLD = msgspec.msgpack.Decoder(None)
_SHOWN = msgspec.msgpack.Decoder(dict[str, Any])
_ANSWERS: dict[type[Call[Any]], msgspec.msgpack.Decoder[Any]] = {
    calls.Open: msgspec.msgpack.Decoder(Placed | Rejected),
    calls.PrefillDone: _TOLD,
    calls.Close: _TOLD,
    calls.Withdraw: _TOLD,
    calls.Lost: _TOLD,
    calls.Silent: msgspec.msgpack.Decoder(tuple[str, ...]),
    calls.View: msgspec.msgpack.Decoder(ManagerView),
    calls.Report: msgspec.msgpack.Decoder(ReportAnswer),
    calls.Ready: _SHOWN,
    calls.Status: _SHOWN,
    calls.Adopt: _TOLD,
}


def packed_call(call: Call[Any]) -> msgspec.Raw:
    """A call, encoded."""
    return msgspec.Raw(_ENCODER.encode(call))


def call_of(packed: msgspec.Raw) -> AnyCall:
    """The call. Raises BadMessage when this version knows no such call."""
    try:
        return cast(AnyCall, _CALLS.decode(packed))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"no call of this version: {error}") from error


def packed_answer(answer: Answer) -> msgspec.Raw:
    """An answer, encoded."""
    on_wire: Any = answer
    if isinstance(answer, Admit):
        on_wire = Placed(answer.placement)
    elif isinstance(answer, Reject):
        on_wire = Rejected(answer)
    return msgspec.Raw(_ENCODER.encode(on_wire))


def answer_of(call: Call[A], packed: msgspec.Raw) -> A:
    """The answer to this call. Raises BadMessage when this version knows no such answer."""
    try:
        answer = _ANSWERS[type(call)].decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"no answer of this version to {type(call).__name__}: {error}") from error
    if isinstance(answer, Placed):
        answer = Admit(answer.placement)
    elif isinstance(answer, Rejected):
        answer = answer.reject
    return cast(A, answer)


def seal(secret: str) -> SealOf[msgspec.Raw]:
    """The seal by which both sides authenticate encoded messages."""
    return SealOf(secret, msgspec.Raw, MAX_BYTES, _PURPOSE)


def packed(message: AnyMessage) -> msgspec.Raw:
    """A message, encoded."""
    return msgspec.Raw(_ENCODER.encode(message))


def message_of(body: msgspec.Raw) -> AnyMessage | Unknown:
    """The message; `Unknown` where this version knows none like it. Raises BadMessage when it has no number either."""
    try:
        return cast(AnyMessage, _MESSAGES.decode(body))
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    try:
        return _UNKNOWN.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"a frame that fits no message: {error}") from error


def framed(sealed: bytes) -> bytes:
    """A sealed message as it goes over the connection."""
    return len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed


class Frames:
    """Puts sealed messages together again from the bytes that come over a connection."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are whole now. Raises BadMessage for one that claims to be longer than `MAX_BYTES`."""
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
    """One end of a connection: messages to bytes and back. A peer that sends an illegal message is cut off."""

    _transport: asyncio.Transport

    def __init__(self, sealed: SealOf[msgspec.Raw], peer: str) -> None:
        """`peer`: what is at the other end, for the log."""
        self._seal, self._frames, self._peer = sealed, Frames(), peer

    def take(self, message: AnyMessage | Unknown) -> None:
        """Take in a message. Raises BadMessage when the other side may not send such a message."""
        raise NotImplementedError

    def send(self, message: AnyMessage) -> None:
        """Send a message, unless the connection is closing."""
        if not self._transport.is_closing():
            self._transport.write(framed(self._seal.pack(packed(message))))

    def close(self) -> None:
        """Close the connection when everything is sent; idempotent."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _tune(transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self.take(message_of(self._seal.unpack(frame)))
        except BadMessage as error:
            logger.warning("%s was cut off: %s", self._peer, error)
            self.close()


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
