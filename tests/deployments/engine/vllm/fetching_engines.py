"""Three real engines that fetch from each other, without a session manager, and what can go wrong with them.

`a` is plain. `b` has a host tier and a disk tier. `c` writes slowly to others. Their memories hold a third of all
prompts or less, so that they evict while they lend.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from configs.schema import (
    BatonConfig,
    ChannelConfig,
    DiskKVConfig,
    ModelConfig,
    PacingConfig,
    PoolConfig,
    VllmEngineConfig,
)
from deployments.engine.build import environment
from deployments.engine.vllm.engine import VllmEngine
from deployments.messages import Role
from load_tests.chaos.tier_files import damage
from tests.deployments.engine.conftest import WAIT_S, Running
from tests.deployments.engine.vllm.test_channel import MAX_MODEL_LEN
from tests.deployments.engine.vllm.vllm_wire import decode_outputs, encode

NAMES = ("a", "b", "c")
TIERED, SLOW = "b", "c"
BLOCK, BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 32, 96, 12, 120
SLOW_BYTES_PER_S = 30e6
"""Some six blocks of the model of `test_channel` in 40 ms."""
HANDOFF_S = 60.0
LOST = -1
"""The reason of an answer whose engine was killed."""
FULL_BLOCKS = 60
"""What lies behind so many blocks of a file is not written while the disk is full."""


class Engines:
    """Call `start` with the names of the engines that shall run. `lives`: how often each was started."""

    def __init__(self, model: Path, disk: Path, block_bytes: int) -> None:
        self._model, self._disk, self._block_bytes = model, disk, block_bytes
        self.running: dict[str, Running] = {}
        self.peers: dict[str, list[str]] = {}
        self.lives = dict.fromkeys(NAMES, 0)
        self.totals: dict[str, float] = {}

    async def start(self, *names: str) -> None:
        """Start engines one after another, and introduce all to each other.

        Of two that are forked at the same time, one can inherit the pipe by whose end the death of the other is seen.
        """
        model = ModelConfig(source=str(self._model), dtype="float32", max_model_len=MAX_MODEL_LEN)
        pool = self._pool(NAMES[0])
        os.environ.update(environment(BatonConfig(model=model, prefill=pool, decode={"main": pool}), "prefill"))
        for name in names:
            self.running[name] = made = await self._started(name)
            self.peers[name] = list(made.info.endpoints)
            self.lives[name] += 1
        everyone = [made.info.endpoints for made in self.running.values()]
        await asyncio.gather(*(made.engine.meet(everyone) for made in self.running.values()))

    async def _started(self, name: str) -> Running:
        pacing = PacingConfig(bytes_per_s=SLOW_BYTES_PER_S if name == SLOW else None, peer_bytes=self._block_bytes)
        engine = VllmEngine(
            self._settings(name),
            ModelConfig(source=str(self._model), dtype="float32", max_model_len=MAX_MODEL_LEN),
            ChannelConfig(handoff_timeout_s=HANDOFF_S, pacing=pacing),
            model_path=str(self._model),
            role=Role.DECODE,
            replica_id=name,
            secret="a secret of the tests",
            host="127.0.0.1",
        )
        return Running(engine, await engine.start(), encode, decode_outputs)

    def _pool(self, name: str) -> PoolConfig:
        return PoolConfig(engine=self._settings(name))

    def _settings(self, name: str) -> VllmEngineConfig:
        disk = DiskKVConfig(path=str(self._disk), bytes=DISK_BLOCKS * self._block_bytes)
        tiers: dict[str, Any] = {"host_kv_bytes": HOST_BLOCKS * self._block_bytes, "disk_kv": disk}
        return VllmEngineConfig(
            block_size=BLOCK,
            kv_cache_memory_bytes=(BLOCKS + 1) * self._block_bytes,
            max_num_batched_tokens=128,
            engine_args={"skip_tokenizer_init": True},
            **(tiers if name == TIERED else {}),
        )

    async def kill(self, name: str) -> None:
        """`kill -9` of an engine. Its answers end with `LOST`."""
        made = self.running.pop(name)
        with suppress(TimeoutError):
            self._count(await made.engine.counters())
        processes = processes_of(made)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            await asyncio.to_thread(process.join, WAIT_S)
        await asyncio.wait_for(made._pump, WAIT_S)
        for answer in made.answers.values():
            if answer.reason is None:
                answer.reason = LOST
                answer.done.set()
        await made.engine.shutdown()

    def _count(self, counters: dict[str, float]) -> None:
        for counter, value in counters.items():
            self.totals[counter] = self.totals.get(counter, 0.0) + value

    async def settle(self) -> None:
        """Wait until all blocks are free, no transfer is open and no tier has a job, and add up the counters."""
        for made in self.running.values():
            await made.settle()
            self._count(await made.until_counter(lambda counters: not counters.get("tier_open_jobs")))

    async def close(self) -> None:
        for made in self.running.values():
            await made.close()

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Meanwhile an engine's process stands still."""
        processes = processes_of(self.running[name])
        _signal(processes, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(processes, signal.SIGCONT)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Meanwhile the tiered engine's files cannot grow, and nothing is written behind a point that lies in them."""
        (process,) = processes_of(self.running[TIERED])
        _limit_files(process.pid, FULL_BLOCKS * self._block_bytes)
        try:
            yield
        finally:
            _limit_files(process.pid, resource.RLIM_INFINITY)

    def damage(self, draw: random.Random) -> None:
        """Break what is on disk."""
        assert damage(self._disk, draw)


def processes_of(made: Running) -> list[Any]:
    engine: Any = made.engine
    return list(engine._client.resources.engine_manager.processes)


def _signal(processes: list[Any], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(process.pid, number)


def _limit_files(pid: int, size: int) -> None:
    """Python ignores the signal that comes with the error."""
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
