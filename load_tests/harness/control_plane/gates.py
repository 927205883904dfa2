"""Mock engines and KV planes that a test can stop, slow down, break and fill."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from deployments.engine.mock.engine import MockEngine
from deployments.engine.mock.wire import FinishReason
from deployments.engine.protocol import Output, Step
from deployments.messages import Role
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.plane import PlaneError, WriteState


class GatedPlane(InProcessPlane):
    """A KV plane that a test controls. While `shut` is set, writes do not end. While `broken` is set, writes fail.

    Its name is like no other's: a process may have several clusters, whose replicas have the same ids.
    """

    def __init__(self, replica_id: str) -> None:
        super().__init__(f"{replica_id}-{uuid.uuid4().hex[:8]}")
        self.shut = self.broken = False
        self.writes = 0
        self.on_write: Callable[[], None] = lambda: None

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> Any:
        self.writes += 1
        self.on_write()
        return agent, layer, tuple(local), tuple(remote)

    def check(self, handle: Any) -> WriteState:
        if self.broken:
            return WriteState.FAILED
        if self.shut:
            return WriteState.BUSY
        try:
            return super().write(*handle)
        except PlaneError:
            return WriteState.FAILED


class _Structured(msgspec.Struct, frozen=True):
    grammar: str | None = None


class _Sampling(msgspec.Struct, frozen=True):
    structured_outputs: _Structured | None = None


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """The leading fields of vLLM's EngineCoreRequest, with what a mock engine does not read."""

    request_id: str
    prompt_token_ids: Any
    mm_features: Any
    sampling_params: _Sampling


class _Refused(msgspec.Struct, frozen=True, array_like=True):
    """The leading fields of vLLM's EngineCoreOutput, up to where an engine says why a request ended in an error."""

    request_id: str
    new_token_ids: tuple[int, ...]
    new_logprobs: None = None
    new_prompt_logprobs_tensors: None = None
    pooling_output: None = None
    finish_reason: FinishReason = FinishReason.ERROR
    stop_reason: None = None
    events: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    trace_headers: dict[str, str] = {}


_REQUEST = msgspec.msgpack.Decoder(_Request)
_FAULT = "baton-fault"  # transfer/vllm/faults.py


class GatedEngine(MockEngine):
    """A mock engine that a test controls.

    It computes nothing while `go` is clear. It sets `stopped` when it has work and waits for `go`. `is_deaf`: it
    answers no question, like an engine in an endless step. `slower_s`: seconds added to each step. `poison`: it crashes
    when it computes a prompt that begins with this token. `useless_grammar`: a request with it ends at once in an error
    that says so, as one ends in vLLM whose grammar cannot be used. `script`: the tokens that every answer begins with.
    `role`: of its pool.
    """

    def __init__(self, *args: Any, role: Role, **options: Any) -> None:
        super().__init__(*args, **options)
        self._role = role
        self.go, self.stopped, self.is_deaf = asyncio.Event(), asyncio.Event(), False
        self.slower_s = 0.0
        self.poison: int | None = None
        self.useless_grammar: str | None = None
        self.script: Sequence[int] = ()
        self.on_point: Callable[[str], None] = lambda point: None
        self.go.set()

    async def add(self, frames: tuple[bytes, ...]) -> None:
        if self.useless_grammar is not None and (refused := self._refused(frames)) is not None:
            self._steps.put_nowait(Step((refused,), self._last_load))
            return
        await super().add(frames)
        if self._role is Role.DECODE:
            self.on_point("before_offer")

    def _refused(self, frames: tuple[bytes, ...]) -> Output | None:
        """The only output of a request with the grammar that cannot be used; None for any other request."""
        request = _REQUEST.decode(frames[0])
        asked = request.sampling_params.structured_outputs
        if asked is None or asked.grammar != self.useless_grammar:
            return None
        why = {_FAULT: "the grammar cannot be used: no text satisfies it"}
        last = _Refused(request.request_id, (), trace_headers=why)
        return Output(request.request_id, 0, True, last)

    def _loaded(self, sequence: Any, token: int | None) -> None:
        super()._loaded(sequence, token)
        self.on_point("landing")

    async def _compute(self, work: Any) -> None:
        if not self.go.is_set():
            self.stopped.set()
            await self.go.wait()
            self.stopped.clear()
        if any(sequence.tokens[0] == self.poison for sequence, _ in work):
            raise ValueError("a request that this engine cannot compute")
        if self.slower_s:
            await asyncio.sleep(self.slower_s)
        await super()._compute(work)
        if self._role is Role.DECODE:
            self.on_point("decoding")

    def _next_token(self, sequence: Any) -> int:
        said = self.script[sequence.generated :]
        return said[0] if said else super()._next_token(sequence)

    async def counters(self) -> dict[str, float]:
        if self.is_deaf:
            await asyncio.sleep(3600)
        return await super().counters()

    @property
    def used_blocks(self) -> int:
        """The number of blocks that sequences hold, as the engine counts them."""
        return self._scheduler.used_blocks

    def fill(self) -> Callable[[], None]:
        """Take every free block. Returns a function that gives them back."""
        free = self._scheduler._free
        taken = tuple(free)
        free.clear()

        def give_back() -> None:
            free.extend(taken)
            self._wake.set()

        return give_back
