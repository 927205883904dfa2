"""What crosses the connection between an ingress and a replica.

The ingress numbers the parts that it begins. A part's outputs and its end come over one connection, in order: the end
cannot overtake the last output.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from deployments.messages import SessionTask
from deployments.sealed_connection import Seal, unpacked
from transfer.control.seal import SealOf

MAX_BYTES = 256 * 1024 * 1024
"""The largest size of a message. The largest are requests with images, and steps with many log probabilities."""
_PURPOSE = b"session-link"
LOOKS = 4
"""How often in a lease an ingress gives a sign of life, and a replica looks for one."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything on the wire. `number`: of the part that it is about; 0: of none."""

    number: int


class Begin(Message, frozen=True):
    """The ingress begins a part."""

    task: SessionTask


class Cancel(Message, frozen=True):
    """The ingress no longer wants this part. It gets no more outputs, and no end."""


class Beat(Message, frozen=True):
    """The ingress is alive."""


class Outputs(Message, frozen=True):
    """The outputs of one engine step for this ingress. `frames`: of an encoded EngineCoreOutputs.

    `finished`: the parts that have ended with these outputs.
    """

    frames: list[bytes]
    finished: list[int] = []


class Ended(Message, frozen=True):
    """A part has ended in another way than with its last output. `outcome`: `expired` or `MOVED`."""

    outcome: str


class Blame(StrEnum):
    """What a part's failure says beyond itself. `REQUEST`: it fails anywhere. `CRASH`: the engine has crashed."""

    NONE = ""
    REQUEST = "request"
    CRASH = "crash"


class Failed(Message, frozen=True):
    """A part has failed, or the replica does not know such a message."""

    why: str
    blame: str = Blame.NONE


class Unknown(msgspec.Struct, frozen=True, array_like=True):
    """A message of another version, of which only the number is known."""

    kind: str
    number: int


AnyMessage = Begin | Cancel | Beat | Outputs | Ended | Failed
_MESSAGES: msgspec.msgpack.Decoder[AnyMessage | Unknown] = msgspec.msgpack.Decoder(AnyMessage)
_UNKNOWN: msgspec.msgpack.Decoder[AnyMessage | Unknown] = msgspec.msgpack.Decoder(Unknown)


def seal(secret: str) -> Seal:
    """The seal by which both sides authenticate messages."""
    return SealOf(secret, msgspec.Raw, MAX_BYTES, _PURPOSE)


def message_of(body: msgspec.Raw) -> AnyMessage | Unknown:
    """The message; `Unknown` where this version knows none like it. Raises BadMessage when it has no number either."""
    return unpacked(body, _MESSAGES, _UNKNOWN)
