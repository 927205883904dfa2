"""Control messages between workers: their schema, and how they are sealed on the wire.

A sealed message is a 16-byte keyed BLAKE2b digest followed by msgpack. What does not carry the deployment's
secret, exceeds `MAX_BYTES` or does not fit the schema is refused with `BadMessage`; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

import msgspec

from transfer.layout import KVLayout

DIGEST_BYTES = 16
MAX_BYTES = 8 * 1024 * 1024
REASON_CHARS = 1024

# Bounded, because the newest few thousand of them are remembered.
Name = Annotated[str, msgspec.Meta(max_length=256)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]  # NaN is not
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class BadMessage(Exception):
    """Bytes that are not a message of this deployment."""


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


class Seal:
    """Encodes and authenticates messages with the deployment's secret."""

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), digest_size=32).digest()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AnyMessage)

    def _digest(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=self._key).digest()

    def pack(self, message: AnyMessage) -> bytes:
        """The message as bytes for the wire."""
        body = self._encoder.encode(message)
        return self._digest(body) + body

    def unpack(self, frame: bytes) -> AnyMessage:
        """The message in a frame. Raises BadMessage."""
        if not DIGEST_BYTES < len(frame) <= MAX_BYTES:
            raise BadMessage(f"a frame of {len(frame)} bytes")
        digest, body = frame[:DIGEST_BYTES], frame[DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(body)):
            raise BadMessage("a frame with a wrong seal")
        try:
            message: AnyMessage = self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BadMessage(f"a frame that fits no message: {error}") from error
        return message
