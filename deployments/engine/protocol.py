"""An engine core as Baton sees it: add a request, abort it, get outputs by step.

The real one is in `vllm/`, the double in `mock/`; both pass tests/deployments/engine/test_contract.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.messages import Bring, CacheChange, HeldAdapters, Pin, ReplicaInfo, Role, StepSample


class EngineError(Exception):
    """The engine core is dead or refuses; the replica is unhealthy."""


class EngineCrashed(EngineError):
    """The engine core has ended by itself, as in an error of a step. It was not killed from outside."""


class RequestRefused(EngineError):
    """The engine cannot take this request, and goes on with all others."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The replica that an engine belongs to. `host`: the address at which its peers reach it. `strict`: of its pool."""

    replica_id: str
    pool: str
    role: Role
    node_id: str
    host: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Known once the engine is up; `ReplicaInfo` says what the last four are."""

    fingerprint: str
    block_size: int
    total_blocks: int
    max_sessions: int
    max_model_len: int
    endpoints: tuple[str, ...]
    chunk_tokens: int = 0
    kv_bytes_per_token: int = 0
    prior: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's own counters after its last step. Blocks are KV blocks; tokens count from the engine's start.

    `cached_blocks`: blocks in the prefix cache, in use or not. `running_tokens`: held by the sequences that decode.
    `deferred`: those of `waiting` that wait for something else than room, such as for their KV. `pinned`: the blocks
    that each pinned prefix holds, by its id; they are among `used_blocks`.
    """

    used_blocks: int = 0
    running: int = 0
    waiting: int = 0
    cached_blocks: int = 0
    running_tokens: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    deferred: int = 0
    pinned: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """One request's part of a step. `payload` is what `encode` takes."""

    request_id: str
    new_tokens: int
    finished: bool
    payload: Any


@dataclass(frozen=True, slots=True)
class Step:
    """News of an engine. `steps`: the steps that it reports; none where nothing was computed."""

    outputs: tuple[Output, ...]
    load: EngineLoad
    steps: tuple[StepSample, ...] = ()


WorkerSpans = tuple[float, dict[str, list[dict[str, Any]]]]
"""A worker's clock now, in seconds, and spans by session (`transfer.channel.handoff_log.Span`) by the same clock."""


class Engine(Protocol):
    """One engine core."""

    async def start(self) -> EngineInfo:
        """Load the model; seconds to minutes. Raises EngineError."""

    async def add(self, frames: tuple[bytes, ...]) -> None:
        """Add an encoded EngineCoreRequest. Raises EngineError when the engine is dead, and RequestRefused."""

    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests; unknown ids are ignored. Their blocks are free once no peer can write them any more."""

    async def step(self) -> Step:
        """Wait for the next step's outputs. Raises EngineError when the engine dies, EngineCrashed when it crashes."""

    def encode(self, payloads: list[Any]) -> list[bytes]:
        """Encode outputs of one step as the frames of an EngineCoreOutputs message."""

    async def meet(self, peers: Sequence[tuple[str, ...]]) -> None:
        """The replicas that this one may exchange KV with, each the endpoints of its workers by rank.

        Connections to new ones are made now instead of at the first request, and what is gone is forgotten.
        """

    def cache_change(self, whole: bool) -> CacheChange | None:
        """How the prefix cache changed since the last call, or with `whole` all of it; None when it did not.

        The first change is a whole one. Each change is given once: ask for the whole when a change was lost.
        """

    async def pin(
        self, request_id: str, keep: Collection[str], pin: Pin | None = None, source: ReplicaInfo | None = None
    ) -> None:
        """Unpin every prefix whose id is not in `keep`, and compute and pin `pin`.

        The whole blocks of a pinned prefix stay in the prefix cache. `source`: a replica to fetch them from. A request
        of this id does the work. By the output that finishes it, `EngineLoad.pinned` says what stands. Raises
        EngineError when the engine is dead, and RequestRefused.
        """

    def hashes(self, frames: tuple[bytes, ...]) -> tuple[int, ...]:
        """Chained hashes of the full blocks of a request's prompt, as in `cache_change`. Raises RequestRefused.

        None where its KV depends on more than tokens, an adapter and a cache salt.
        """

    async def bring(self, bring: Bring) -> None:
        """Get KV from another replica's cache into this one's. What does not come is computed, of one prompt.

        A request with the task's id does it, and the output that finishes it ends it; `abort` gives it up. Raises
        EngineError when the engine is dead, and RequestRefused.
        """

    def adapters(self) -> HeldAdapters:
        """The LoRA adapters that are loaded."""

    async def counters(self) -> dict[str, float]:
        """The KV channel's counters, summed over workers (bytes written, handoffs landed, ...)."""

    async def spans(self, session_ids: list[str]) -> list[WorkerSpans]:
        """What each worker's KV channel did for these sessions, and when; of those that it still knows."""

    async def shutdown(self) -> None:
        """End the engine's processes; idempotent."""
