"""How calls of the session manager and their answers travel: the messages of its connections.

Each connection numbers its calls, and an answer repeats its call's number. Calls and answers are encoded inside the
message, so that a call or an answer which the other side does not know, as in a rolling update, fails alone and not
with its connection.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from deployments.manager import calls
from deployments.manager.calls import A, Answer, AnyCall, Call
from deployments.messages import AdapterList, Admit, Allowance, ManagerView, Placement, Reject, ReportAnswer
from deployments.sealed_connection import Seal, packed, unpacked
from transfer.control.seal import BadMessage, SealOf

MAX_BYTES = 64 * 1024 * 1024
"""The largest size of a message. The largest messages are a view of the whole fleet and a replica's whole prefix cache,
at ten bytes a block."""
_PURPOSE = b"session-manager"


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


class Placed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """`Admit` on the wire."""

    placement: Placement
    allowance: Allowance | None = None
    tell_tokens: int = 0


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """`Reject` on the wire."""

    reject: Reject


class _Kind(msgspec.Struct, frozen=True):
    """The tag of a call."""

    type: str


_MESSAGES: msgspec.msgpack.Decoder[AnyMessage | Unknown] = msgspec.msgpack.Decoder(AnyMessage)
_UNKNOWN: msgspec.msgpack.Decoder[AnyMessage | Unknown] = msgspec.msgpack.Decoder(Unknown)
_KINDS = msgspec.msgpack.Decoder(_Kind)
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
    calls.Overview: _SHOWN,
    calls.Explain: _SHOWN,
    calls.Drain: _SHOWN,
    calls.Prefixes: _SHOWN,
    calls.HandOn: msgspec.msgpack.Decoder(int),
    calls.Brought: _TOLD,
    calls.Adopt: _TOLD,
    calls.TellPrefix: _TOLD,
    calls.ShareAdapters: msgspec.msgpack.Decoder(AdapterList),
}


def is_opening(body: msgspec.Raw) -> bool:
    """Whether a call asks to open a session."""
    try:
        return _KINDS.decode(body).type == calls.Open.__name__
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False


def call_of(body: msgspec.Raw) -> AnyCall:
    """The call. Raises BadMessage when this version knows no such call."""
    try:
        return cast(AnyCall, _CALLS.decode(body))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"no call of this version: {error}") from error


def packed_answer(answer: Answer) -> msgspec.Raw:
    """An answer, encoded."""
    on_wire: Any = answer
    if isinstance(answer, Admit):
        on_wire = Placed(answer.placement, answer.allowance, answer.tell_tokens)
    elif isinstance(answer, Reject):
        on_wire = Rejected(answer)
    return packed(on_wire)


def answer_of(call: Call[A], body: msgspec.Raw) -> A:
    """The answer to this call. Raises BadMessage when this version knows no such answer."""
    try:
        answer = _ANSWERS[type(call)].decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"no answer of this version to {type(call).__name__}: {error}") from error
    if isinstance(answer, Placed):
        answer = Admit(answer.placement, answer.allowance, answer.tell_tokens)
    elif isinstance(answer, Rejected):
        answer = answer.reject
    return cast(A, answer)


def seal(secret: str) -> Seal:
    """The seal by which both sides authenticate encoded messages."""
    return SealOf(secret, msgspec.Raw, MAX_BYTES, _PURPOSE)


def message_of(body: msgspec.Raw) -> AnyMessage | Unknown:
    """The message; `Unknown` where this version knows none like it. Raises BadMessage when it has no number either."""
    return unpacked(body, _MESSAGES, _UNKNOWN)
