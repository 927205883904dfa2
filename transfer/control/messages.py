"""The schema of the control messages between workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from transfer.control.seal import SealOf
from transfer.memory.digest import DIGEST_BYTES
from transfer.memory.layout import KVLayout

MAX_BYTES = 8 * 1024 * 1024
REASON_CHARS = 1024
NAME_CHARS = 256
"""The longest name of a session: a worker drops a message with a longer one, and keeps a few thousand names."""

Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]  # NaN is refused, too
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Hash = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base class of all messages on the wire."""


class Hello(Message, frozen=True):
    """A decode worker introduces itself: its agent on the data plane, and the memory that may be written.

    `address`: the worker's own control endpoint.
    """

    address: Name
    agent: Name
    agent_metadata: bytes
    layout: KVLayout


class Welcome(Message, frozen=True):
    """The prefill worker accepts the peer."""


class Refused(Message, frozen=True):
    """The prefill worker will never write to this peer on this connection, and gives the reason.

    The peer may introduce itself again on another connection.
    """

    reason: Reason


class Offer(Message, frozen=True):
    """Decode worker `rank` offers blocks for a session's prompt, from the prompt's block `first_block` on."""

    session: Name
    epoch: int
    rank: int
    first_block: int
    blocks: list[int]
    timeout_s: Seconds


class Cancel(Message, frozen=True):
    """Decode worker `rank` asks for no more writes, and for an answer once there will be none."""

    session: Name
    epoch: int
    rank: int
    reason: Reason


class Landed(Message, frozen=True):
    """Every offered block is written.

    `digests`: of a fetch, one for each block that was found, of what the worker read and wrote of it.
    """

    session: Name
    epoch: int
    digests: tuple[Digest, ...] = ()


class Failed(Message, frozen=True):
    """The prefill worker will write no more for this session."""

    session: Name
    epoch: int
    reason: Reason


class FirstToken(Message, frozen=True):
    """The first token of the answer, sampled by prefill."""

    session: Name
    epoch: int
    token: TokenId


class Fetch(Message, frozen=True):
    """Worker `rank` asks for the KV of cached blocks: that of `hashes[i]` into its own block `blocks[i]`.

    The answer is `Failed`, or `Found` and then, as for an offer, `Landed` or `Failed`.
    """

    session: Name
    epoch: int
    rank: int
    blocks: list[int]
    hashes: list[Hash]
    timeout_s: Seconds


class Found(Message, frozen=True):
    """The worker has this number of the leading blocks that were asked for, and writes those."""

    session: Name
    epoch: int
    blocks: Count


class Nudge(Message, frozen=True):
    """A write to the receiver of this message is still under way: the receiver drives its side of the transport."""


AnyMessage = Hello | Welcome | Refused | Offer | Cancel | Landed | Failed | FirstToken | Fetch | Found | Nudge


class Seal(SealOf[AnyMessage]):
    """Seals control messages with the deployment's secret."""

    def __init__(self, secret: str) -> None:
        super().__init__(secret, AnyMessage, MAX_BYTES)
