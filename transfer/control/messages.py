"""Control messages between workers: their schema."""

from __future__ import annotations

from typing import Annotated

import msgspec

from transfer.control.seal import SealOf
from transfer.memory.layout import KVLayout

MAX_BYTES = 8 * 1024 * 1024
REASON_CHARS = 1024

# Bounded, because the newest few thousand of them are remembered.
Name = Annotated[str, msgspec.Meta(max_length=256)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]  # NaN is not
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything on the wire."""


class Hello(Message, frozen=True):
    """Decode introduces itself: who may be written to, and where. `address`: its own control endpoint."""

    address: Name
    agent: Name
    agent_metadata: bytes
    layout: KVLayout


class Welcome(Message, frozen=True):
    """Prefill accepts the peer."""


class Refused(Message, frozen=True):
    """Prefill never writes to this peer on this connection, and why. It may introduce itself anew on another."""

    reason: Reason


class Offer(Message, frozen=True):
    """Decode worker `rank` offers blocks for a session's prompt, from its block `first_block` on."""

    session: Name
    epoch: int
    rank: int
    first_block: int
    blocks: list[int]
    timeout_s: Seconds


class Cancel(Message, frozen=True):
    """Decode worker `rank` wants no more writes and an answer when there will be none."""

    session: Name
    epoch: int
    rank: int
    reason: Reason


class Landed(Message, frozen=True):
    """Every offered block is written."""

    session: Name
    epoch: int


class Failed(Message, frozen=True):
    """Prefill will write no more for this session."""

    session: Name
    epoch: int
    reason: Reason


class FirstToken(Message, frozen=True):
    """The token that prefill sampled."""

    session: Name
    epoch: int
    token: TokenId


class Nudge(Message, frozen=True):
    """A write to you is under way and not over: drive your side of the transport."""


AnyMessage = Hello | Welcome | Refused | Offer | Cancel | Landed | Failed | FirstToken | Nudge


class Seal(SealOf[AnyMessage]):
    """Seals control messages with the deployment's secret."""

    def __init__(self, secret: str) -> None:
        super().__init__(secret, AnyMessage, MAX_BYTES)
