"""The systems of the transfer benchmark: all are started, and one runs at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

from configs.schema import BatonConfig, ChannelConfig, ModelConfig, PoolConfig, VllmEngineConfig
from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, resolve
from deployments.engine.build import checkpoint, environment
from deployments.engine.vllm.engine import VllmEngine
from deployments.host.processes import descendants
from deployments.host.shared_memory import PREFIXES, SEMAPHORES, remove, shared_memory_of
from deployments.messages import Role
from load_tests.harness.application import free_port
from load_tests.harness.engines.nixl_engine import NixlEngine, settings
from load_tests.harness.engines.pair import BatonPair, Core, Pair, PullPair, PushPair
from load_tests.harness.processes import Guard, cpu_s, pause, resume

SYSTEMS: dict[str, type[Pair]] = {"baton": BatonPair, "vllm_pull": PullPair, "vllm_push": PushPair}
CONNECTORS = {"vllm_pull": "MeasuredPullConnector", "vllm_push": "MeasuredPushConnector"}
BLOCK_TOKENS = 128
SPARE_BLOCKS = 8
ANSWER_TOKENS = 64
FLOAT32_BYTES = 4
SETTLE_S = 0.3
CLOSE_TIMEOUT_S = 20.0


class RigError(Exception):
    """The systems cannot be compared."""


def configuration(longest_prompt: int, chunk_tokens: int) -> BatonConfig:
    """One prefill and one decode engine with the same arguments, on CPU.

    Their KV memory holds one request and a few more.
    """
    model = ModelConfig(dtype="float32", max_model_len=longest_prompt + ANSWER_TOKENS)
    layers, layer_block_bytes = kv_shape(model)
    engine = VllmEngineConfig(
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=(blocks(model.max_model_len) + SPARE_BLOCKS) * layers * layer_block_bytes,
        max_num_batched_tokens=chunk_tokens,
    )
    pool = PoolConfig(engine=engine)
    return BatonConfig(model=model, prefill=pool, decode={"bench": pool}, channel=ChannelConfig(handoff_timeout_s=300))


def blocks(tokens: int) -> int:
    """The number of KV blocks that `tokens` tokens take."""
    return -(-tokens // BLOCK_TOKENS)


def kv_shape(model: ModelConfig) -> tuple[int, int]:
    """The number of layers, and the bytes of one block in one layer."""
    facts = json.loads((Path(resolve(model.source, model.cache_dir or DEFAULT_CACHE_DIR)) / "config.json").read_text())
    values = 2 * facts["num_key_value_heads"] * facts["head_dim"]
    return facts["num_hidden_layers"], values * FLOAT32_BYTES * BLOCK_TOKENS


class Rig:
    """Starts pairs one after another, and pauses all but the one in use, because an idle vLLM replica uses CPU."""

    def __init__(self, config: BatonConfig, trace_dir: Path) -> None:
        self.config, self._trace_dir = config, trace_dir
        self._guard = Guard()
        self.pairs: dict[str, Pair] = {}
        os.environ.update(environment(config, "prefill"))

    async def start(self, system: str) -> None:
        """Start one system's two engines while the other systems are paused."""
        before = descendants(os.getpid())
        engines = [self._engine(system, role) for role in (Role.PREFILL, Role.DECODE)]
        try:
            infos = await asyncio.gather(*(engine.start() for engine in engines))
        finally:
            pids = descendants(os.getpid()) - before
            self._guard.watch(pids)
        cores = [Core(engine, info) for engine, info in zip(engines, infos, strict=True)]
        self.pairs[system] = SYSTEMS[system](system, cores[0], cores[1], pids, self._trace_dir / system)
        pause(pids)

    def _engine(self, system: str, role: Role) -> VllmEngine:
        pool = "prefill" if role is Role.PREFILL else "decode-bench"
        engine, name = self.config.pools[pool].engine, f"{system}-{pool}"
        assert isinstance(engine, VllmEngineConfig)
        path = checkpoint(self.config)
        channel = self.config.channel.model_copy(update={"trace_dir": str(self._trace_dir / system)})
        model = self.config.model
        if system == "baton":
            return VllmEngine(
                engine, model, channel, model_path=path, role=role, replica_id=name, secret="bench", host="127.0.0.1"
            )
        return NixlEngine(
            engine,
            model,
            channel,
            model_path=path,
            role=role,
            name=name,
            connector=CONNECTORS[system],
            port=free_port(),
        )

    @contextlib.asynccontextmanager
    async def turn(self, system: str) -> AsyncIterator[Pair]:
        """Resume this system, and pause it afterwards."""
        pair = self.pairs[system]
        resume(pair.pids)
        try:
            await asyncio.sleep(SETTLE_S)
            yield pair
        finally:
            pause(pair.pids)

    def common_settings(self) -> dict[str, str]:
        """The settings of all engines. Raises RigError when they differ."""
        found = [settings(core.engine) for pair in self.pairs.values() for core in (pair.prefill, pair.decode)]
        if unlike := [other for other in found if other != found[0]]:
            raise RigError(f"the engines differ: {found[0]} and {unlike[0]}")
        return found[0]

    async def idle_cores(self, system: str, seconds: float) -> float:
        """The CPU that one idle replica uses, in cores: the mean of the two replicas over `seconds` seconds."""
        async with self.turn(system) as pair:
            before_s = cpu_s(pair.pids)
            await asyncio.sleep(seconds)
            return (cpu_s(pair.pids) - before_s) / seconds / 2

    async def close(self) -> None:
        """End every engine. A process that does not end by itself is killed."""
        engines = descendants(os.getpid()) - {self._guard.pid}
        self._guard.watch(engines)
        named = shared_memory_of(engines, (*PREFIXES, SEMAPHORES))
        try:
            for pair in self.pairs.values():
                resume(pair.pids)
            closing = asyncio.gather(*(pair.close() for pair in self.pairs.values()), return_exceptions=True)
            await asyncio.wait_for(closing, CLOSE_TIMEOUT_S)
        finally:
            self._guard.close()
            remove(named)
