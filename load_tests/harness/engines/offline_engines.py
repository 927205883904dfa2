"""Real engines that do offline work one at a time: one that works in phases, and one as vLLM schedules by itself.

Both have the same workers, memory and connector. Each run says how large steps may be, so no engine is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from configs.schema import BatonConfig, ModelConfig, PoolConfig, VllmEngineConfig
from deployments.engine.build import checkpoint, environment
from deployments.engine.kv_events import KVEvents
from deployments.engine.vllm.arguments import EngineArguments
from deployments.engine.vllm.engine import VllmEngine
from deployments.host.processes import descendants
from deployments.host.shared_memory import PREFIXES, SEMAPHORES, remove, shared_memory_of
from deployments.messages import Role
from load_tests.harness.engines import rig
from load_tests.harness.engines.pair import Answer, Core
from load_tests.harness.engines.told_schedulers import LIMIT, STEP_TOKENS
from load_tests.harness.processes import Guard, pause, resume, title
from load_tests.report.offline import Ran

BLOCK_TOKENS, MAX_MODEL_LEN = 32, 1024
POLL_S, SETTLE_S, CLOSE_TIMEOUT_S = 0.01, 0.3, 30.0
PHASED, PLAIN = "phased", "plain"
"""The names of the engines."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `answer_tokens`: how long its answer will be."""

    prompt: tuple[int, ...]
    answer_tokens: int


def default_budget(stages: int) -> int:
    """The most tokens of a step that vLLM's class for offline work takes by itself, with so many workers."""
    return int(AsyncEngineArgs.get_batch_defaults(stages)[0][UsageContext.LLM_CLASS])


def configuration(stages: int, kv_tokens: int, seats: int, step_tokens: int) -> BatonConfig:
    """The pools of both engines. `kv_tokens`: what their KV memory holds. `step_tokens`: the most that a run asks of
    ours. It begins with no less than an engine has whose configuration says nothing, and vLLM's with its default."""
    model = ModelConfig(dtype="float32", max_model_len=MAX_MODEL_LEN)
    layers, layer_block_bytes = rig.kv_shape(model)
    block_bytes = layers // stages * layer_block_bytes // rig.BLOCK_TOKENS * BLOCK_TOKENS
    common: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": (-(-kv_tokens // BLOCK_TOKENS) + 1) * block_bytes,  # one is vLLM's null block
        "max_num_seqs": seats,
        "pipeline_parallel_size": stages,
    }
    ours = max(step_tokens, SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS)
    phased = VllmEngineConfig(**common, max_num_batched_tokens=ours, phases="auto")
    theirs = max(step_tokens, default_budget(stages))
    own_steps = {"long_prefill_token_threshold": 0}  # vLLM sizes them
    plain = VllmEngineConfig(**common, max_num_batched_tokens=theirs, engine_args=own_steps)
    return BatonConfig(model=model, mixed={PHASED: PoolConfig(engine=phased), PLAIN: PoolConfig(engine=plain)})


class ToldArguments(EngineArguments):
    """Those of an engine that is told what to do by requests, and whose workers tell how long they compute."""

    def vllm_config(self, transfer: KVTransferConfig, worker_extension: str, events: KVEvents) -> VllmConfig:
        config = super().vllm_config(transfer, worker_extension, events)
        config.parallel_config.worker_cls = "load_tests.harness.engines.timed_worker.TimedWorker"
        kind = "ToldPhased" if self.config.phases == "auto" else "ToldScheduler"
        prefix = "Async" if config.scheduler_config.async_scheduling else ""
        config.scheduler_config.scheduler_cls = f"load_tests.harness.engines.told_schedulers.{prefix}{kind}"
        return config


class ToldEngine(VllmEngine):
    """An engine of `ToldArguments`."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        own = self._arguments
        self._arguments = ToldArguments(**{each.name: getattr(own, each.name) for each in dataclasses.fields(own)})

    async def busy_s(self) -> list[float]:
        """Seconds in which each stage has computed so far."""
        return await self._rpc("stage_busy_s")


class OfflineEngines:
    """Engines of one configuration. All but the one in use are stopped, because an idle one uses CPU."""

    def __init__(self, config: BatonConfig) -> None:
        self._config, self._guard = config, Guard()
        self._cores: dict[str, Core] = {}
        self._pids: dict[str, set[int]] = {}
        self._number = itertools.count()

    async def start(self, name: str) -> None:
        """Start one engine; it is stopped afterwards. Raises EngineError."""
        pool = self._config.mixed[name].engine
        assert isinstance(pool, VllmEngineConfig)
        os.environ.update(environment(self._config, f"mixed-{name}"))
        before = descendants(os.getpid())
        engine = ToldEngine(
            pool,
            self._config.model,
            self._config.channel,
            model_path=checkpoint(self._config),
            role=Role.MIXED,
            replica_id=name,
            secret="bench",
            host="127.0.0.1",
        )
        try:
            info = await engine.start()
        finally:
            made = {pid for pid in descendants(os.getpid()) - before if "resource_tracker" not in title(pid)}
            self._guard.watch(made)
        core = Core(engine, info)
        core.samples = deque()
        self._cores[name], self._pids[name] = core, made
        pause(made)

    async def run(self, name: str, asked: Sequence[Asked], step_tokens: int, limit: int) -> Ran:
        """All requests at once, until the last one is over.

        `step_tokens`: the most of a step, or `CHOOSES`. `limit`: how long an answer may be, as far as ours knows.
        """
        async with self._turn(name) as (core, engine):
            before, busy_s = (await engine.counters())["preemptions"], await engine.busy_s()
            core.samples.clear()
            begun = time.monotonic()
            answers = await self._answers(core, asked, step_tokens, limit)
            times_s = tuple(at_s - begun for answer in answers for at_s in answer.times_s)
            busy = zip(await engine.busy_s(), busy_s, strict=True)
            return Ran(
                seconds=max(times_s),
                times_s=times_s,
                busy_s=tuple(now - then for now, then in busy),
                preemptions=round((await engine.counters())["preemptions"] - before),
                steps=tuple((step.prefill_tokens, step.decode_sequences) for step in core.samples),
                answers=tuple(tuple(answer.tokens) for answer in answers),
            )

    async def _answers(self, core: Core, asked: Sequence[Asked], step_tokens: int, limit: int) -> list[Answer]:
        names = [f"run-{next(self._number)}" for _ in asked]
        extra: dict[str, Any] = {LIMIT: limit, STEP_TOKENS: step_tokens}
        for name, each in zip(names, asked, strict=True):
            await core.add(name, each.prompt, each.answer_tokens, extra=extra)
            extra.pop(STEP_TOKENS, None)
        return [await core.answer(name) for name in names]

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[tuple[Core, ToldEngine]]:
        """Let this engine go on, with nothing in its cache, and stop it afterwards."""
        core = self._cores[name]
        assert isinstance(core.engine, ToldEngine)
        resume(self._pids[name])
        try:
            await asyncio.sleep(SETTLE_S)
            while not await core.engine.forget():  # noqa: ASYNC110 - an engine in another process has no event
                await asyncio.sleep(POLL_S)
            yield core, core.engine
        finally:
            pause(self._pids[name])

    async def close(self) -> None:
        """End every engine. A process that does not end by itself is killed."""
        engines = descendants(os.getpid()) - {self._guard.pid}
        named = shared_memory_of(engines, (*PREFIXES, SEMAPHORES))
        for pids in self._pids.values():
            resume(pids)
        try:
            closing = asyncio.gather(*(core.close() for core in self._cores.values()), return_exceptions=True)
            await asyncio.wait_for(closing, CLOSE_TIMEOUT_S)
        finally:
            self._guard.close()
            remove(named)
