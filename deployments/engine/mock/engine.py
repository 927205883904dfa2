"""A stand-in for the engine core that runs at a configured pace, for tests of the control plane and at scale.

It is no language model. It takes vLLM's requests and returns vLLM's outputs by step, with real blocks and real handoffs
over a KV channel. Its tokens are hashes of the KV in its blocks. It has no prefix cache, and does not import vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections import abc, deque
from dataclasses import replace
from typing import Any

from configs.schema import MockEngineConfig
from deployments.engine.cache_log import CacheLog
from deployments.engine.mock.connections import Connections
from deployments.engine.mock.description import describe
from deployments.engine.mock.memory import MockMemory
from deployments.engine.mock.pinned import pin_request
from deployments.engine.mock.scheduler import MockScheduler, Plan
from deployments.engine.mock.sequence import Sequence, layers_of
from deployments.engine.mock.wire import FinishReason, brought_request, encode_outputs
from deployments.engine.protocol import (
    EngineCrashed,
    EngineError,
    EngineInfo,
    EngineLoad,
    Output,
    RequestRefused,
    Step,
    WorkerSpans,
)
from deployments.messages import Bring, CacheChange, HeldAdapters, Pin, ReplicaInfo, StepSample
from deployments.policy.step_size import PROMPT_SHARE
from transfer.control.messages import FirstToken
from transfer.memory.blocks import blocks_for, chained_hashes
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.plane import Plane

POLL_S = 0.002  # the pause between two looks at the channel, as the channel does not wake an asyncio loop
PREEMPTION_WAIT_S = 30.0  # the longest wait for writes that still read the blocks of a preempted prefill
IDLE_TOKEN = 1000  # every token of an engine that computes nothing. It is an ordinary word


class MockEngine:
    """A stand-in for an engine: it has an engine's pace, but is no language model.

    `handoff_timeout_s`: the time from an offer of blocks until their KV must be there. `plane`: carries the KV. The
    default plane reaches engines of the same process only. `prompt_share`: as in the configuration. `receives`: other
    engines write KV to this one.
    """

    def __init__(
        self,
        config: MockEngineConfig,
        *,
        replica_id: str,
        fingerprint: str,
        secret: str,
        host: str,
        handoff_timeout_s: float,
        max_model_len: int,
        prompt_share: float = PROMPT_SHARE,
        receives: bool = True,
        plane: Plane | None = None,
    ) -> None:
        self._config, self._max_model_len = config, max_model_len
        self._fingerprint = fingerprint
        self._scheduler = MockScheduler(config, prompt_share)
        self._memory = MockMemory(config.num_layers, config.num_blocks, config.block_size, config.seed)
        plane = plane or InProcessPlane(f"{replica_id}-{uuid.uuid4().hex[:8]}")
        layout = self._memory.layout({"fingerprint": fingerprint})
        self._connect = functools.partial(Connections.open, receives, plane, layout, secret, host, handoff_timeout_s)
        self._connections: Connections  # from `start` on
        self._inbox: deque[Sequence | str] = deque()
        self._wake = asyncio.Event()
        self._steps: asyncio.Queue[Step | None] = asyncio.Queue()
        self._counts = {"computed_tokens": 0.0, "loaded_tokens": 0.0, "generated_tokens": 0.0}
        self._last_load = EngineLoad()
        self._cache = CacheLog()
        self._task: asyncio.Task[None] | None = None

    # ---- the engine protocol

    async def start(self) -> EngineInfo:
        config = self._config
        if blocks_for(self._max_model_len, config.block_size) > config.num_blocks:
            raise EngineError(f"{config.num_blocks} blocks do not hold {self._max_model_len} tokens")
        self._connections = self._connect()
        self._task = asyncio.create_task(self._run(), name="baton-mock-engine")
        self._task.add_done_callback(lambda _: self._steps.put_nowait(None))
        return describe(config, self._fingerprint, self._max_model_len, self._connections.channel.address)

    async def add(self, frames: tuple[bytes, ...]) -> None:
        """Add an encoded EngineCoreRequest.

        Raises EngineError when the engine is dead, RequestRefused when it cannot serve the request.
        """
        self._check_alive()
        self._begin(Sequence.decoded(frames))

    async def pin(
        self, request_id: str, keep: abc.Collection[str], pin: Pin | None = None, source: ReplicaInfo | None = None
    ) -> None:
        self._check_alive()
        self._begin(Sequence.of(pin_request(request_id, keep, pin)))

    def _begin(self, sequence: Sequence) -> None:
        if not 0 < sequence.prompt_tokens < self._max_model_len:
            raise RequestRefused(f"a prompt of {sequence.prompt_tokens} tokens, of {self._max_model_len}")
        self._inbox.append(sequence)
        self._wake.set()

    def hashes(self, frames: tuple[bytes, ...]) -> tuple[int, ...]:
        return chained_hashes(Sequence.decoded(frames).tokens, self._config.block_size)

    async def bring(self, bring: Bring) -> None:
        """It has no prefix cache, so it computes the prompt and forgets it."""
        self._check_alive()
        self._begin(Sequence.of(brought_request(Sequence.decoded(bring.request).request, bring)))

    async def abort(self, request_ids: list[str]) -> None:
        self._inbox.extend(request_ids)
        self._wake.set()

    async def step(self) -> Step:
        step = await self._steps.get()
        if step is None:
            self._steps.put_nowait(None)  # for the next caller
            self._check_alive()
            raise EngineError("the mock engine was shut down")
        return step

    def encode(self, payloads: list[Any]) -> list[bytes]:
        return encode_outputs(payloads)

    async def meet(self, peers: abc.Sequence[tuple[str, ...]]) -> None:
        self._connections.meet(peers)

    def cache_change(self, whole: bool) -> CacheChange | None:
        return self._cache.change(whole)

    def adapters(self) -> HeldAdapters:
        return HeldAdapters()

    async def counters(self) -> dict[str, float]:
        if self._task is None:
            return {}
        return self._connections.channel.counters() | self._counts | {"preemptions": self._scheduler.preemptions}

    async def spans(self, session_ids: list[str]) -> list[WorkerSpans]:
        if self._task is None:
            return []
        return [self._connections.channel.spans(session_ids)]

    async def shutdown(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._connections.close()

    def _check_alive(self) -> None:
        if self._task is None:
            raise EngineError("the mock engine was not started")
        if self._task.done():
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                raise EngineCrashed(f"the mock engine crashed: {error!r}") from error
            raise EngineError("the mock engine is dead")

    # ---- the engine's only task

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._take_inbox()
            outputs = self._take_results()
            plan = self._scheduler.plan()
            computed, steps = await self._execute(plan)
            await self._publish(outputs + computed, steps)
            if not plan.work and not plan.preempted:
                with contextlib.suppress(TimeoutError):  # not wait_for: Python 3.11's can lose a cancellation
                    async with asyncio.timeout(POLL_S if self._scheduler.has_handoffs else None):
                        await self._wake.wait()

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                self._scheduler.add(item)
            elif sequence := self._scheduler.abort(item):
                handoff = sequence.request.handoff
                if handoff is not None and sequence.sends:
                    self._connections.channel.ended(handoff.key, item, False)
                elif handoff is not None and item in self._scheduler.loading:
                    self._connections.channel.cancel(handoff.key, "the request was aborted")

    def _take_results(self) -> list[Output]:
        if not self._scheduler.has_handoffs:
            return []
        results = self._connections.channel.take_results()
        for request_id in results.released:
            self._scheduler.release(request_id)
        for request_id, token in results.received.items():
            self._loaded(self._scheduler.loaded(request_id), token)
        failed = [self._scheduler.not_loaded(request_id) for request_id in results.broken]
        return [sequence.output([], FinishReason.ERROR) for sequence in failed if not sequence.is_over]

    def _loaded(self, sequence: Sequence, token: int | None) -> None:
        """The prompt's KV is here. The request continues after it, with prefill's token as the first of the answer."""
        if sequence.is_over:
            return
        assert token is not None, "the only rank carries the first token"
        sequence.computed = sequence.prompt_tokens
        if self._config.computes:
            sequence.chain = int(self._memory.prefix_hashes(0, sequence.tokens, 0)[-1])
        sequence.tokens.append(token)
        sequence.generated += 1
        self._counts["loaded_tokens"] += sequence.prompt_tokens

    async def _execute(self, plan: Plan) -> tuple[list[Output], tuple[StepSample, ...]]:
        keys = [s.request.handoff.key for s in plan.preempted if s.sends and s.request.handoff]
        if keys and not await asyncio.to_thread(self._connections.channel.wait_quiet, keys, PREEMPTION_WAIT_S):
            raise EngineError("writes of a preempted prefill did not end; its blocks cannot be reused safely")
        if self._config.computes:
            self._memory.scrub(plan.fresh)
        for sequence in plan.offers:
            if handoff := sequence.request.handoff:
                peers, blocks = list(handoff.peers), list(sequence.blocks)
                self._connections.channel.offer(handoff.key, sequence.request_id, peers, 0, blocks, needs_token=True)
        if not plan.work:
            return [], ()
        clock = asyncio.get_running_loop().time
        began_s, step = clock(), plan.sample(0.0)
        await self._compute(plan.work)
        outputs = [output for sequence, count in plan.work if (output := self._advance(sequence, count))]
        return outputs, (replace(step, seconds=clock() - began_s),)

    async def _compute(self, work: list[tuple[Sequence, int]]) -> None:
        """Write the step's KV at the configured pace, layer by layer when a handoff takes the layers."""
        layers = self._config.num_layers
        write = layers_of(work, self._memory) if self._config.computes else None
        chunks = [chunk for sequence, count in work if (chunk := sequence.chunk(count))]
        prompts = [count for sequence, count in work if count > 1 or sequence.computed < sequence.prompt_tokens]
        step_s = self._config.step_s + sum(prompts) / self._config.prefill_tokens_per_s
        step_s += (len(work) - len(prompts)) * self._config.sequence_s
        self._connections.channel.begin_step(chunks)
        if not chunks:
            await asyncio.sleep(step_s)
        for layer in range(layers):
            if chunks:
                await asyncio.sleep(step_s / layers)
            if write is not None:
                write(layer)
            self._connections.channel.layer_saved(layer)
        self._connections.channel.end_step()

    def _next_token(self, sequence: Sequence) -> int:
        if not self._config.computes:
            return IDLE_TOKEN
        seed = sequence.request.sampling_params.seed or 0
        return self._memory.next_token(sequence.blocks, sequence.computed, seed)

    def _advance(self, sequence: Sequence, count: int) -> Output | None:
        """Record what a step computed of a request, and sample a token when everything is computed."""
        before, prompt = sequence.computed, sequence.prompt_tokens
        sequence.computed += count
        self._counts["computed_tokens"] += min(sequence.computed, prompt) - min(before, prompt)
        if sequence.computed < len(sequence.tokens):
            return None
        token = sequence.allowed(self._next_token(sequence))
        output = sequence.append(token, self._max_model_len)
        self._counts["generated_tokens"] += 1
        handoff = sequence.request.handoff
        if handoff is not None and sequence.sends and sequence.computed == prompt:
            self._connections.tokens.send(handoff.peers[0], FirstToken(*handoff.key, token))
        if output.finished:
            self._scheduler.finish(sequence)
            if handoff is not None and sequence.sends:
                self._connections.channel.ended(handoff.key, sequence.request_id, True)
        return output

    async def _publish(self, outputs: list[Output], steps: tuple[StepSample, ...]) -> None:
        scheduler = self._scheduler
        load = EngineLoad(
            scheduler.used_blocks,
            len(scheduler.running),
            len(scheduler.waiting) + len(scheduler.loading),
            running_tokens=sum(step.decode_context for step in steps),
            counters=await self.counters(),
            pinned=scheduler.pinned.blocks(),
        )
        last, self._last_load = self._last_load, load
        if steps or outputs or replace(last, counters=load.counters, running_tokens=load.running_tokens) != load:
            self._steps.put_nowait(Step(tuple(outputs), load, steps))
