"""A real engine core: vLLM's V1 engine core in processes of its own, without a frontend.

tests/deployments/engine/vllm/test_contract.py checks what this folder relies on in vLLM.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
from vllm.config import KVTransferConfig
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import MsgpackDecoder

from configs.schema import ChannelConfig, LoraConfig, ModelConfig, VllmEngineConfig
from deployments.engine.kv_events import KVEvents
from deployments.engine.names import names_until_started
from deployments.engine.protocol import (
    EngineCrashed,
    EngineError,
    EngineInfo,
    Output,
    RequestRefused,
    Step,
    WorkerSpans,
)
from deployments.engine.vllm.adapters import Adapters
from deployments.engine.vllm.arguments import EngineArguments
from deployments.engine.vllm.bringing import brought, prompt_hashes
from deployments.engine.vllm.counts import Counts
from deployments.engine.vllm.description import describe
from deployments.engine.vllm.outputs import OutputsDecoder, Seen, Unread, passed_on, seen
from deployments.engine.vllm.pinning import pin_request
from deployments.messages import Bring, CacheChange, HeldAdapters, Pin, ReplicaInfo, Role, StepSample
from deployments.policy.step_size import PROMPT_SHARE

TIERS_SHUTDOWN_S = 20.0
"""How long the processes of an engine with KV tiers get to end: longer than vLLM gives them, so that tiers drain."""
SUMMED = ("_bytes", "_jobs", "_failures", "_errors")  # of the tiers' counters: over all workers of an engine
RPC_TIMEOUT_S = 10.0  # the longest that the engine's workers take to answer a call
EXIT_S = 1.0  # the longest that a dead engine's process takes to end


class VllmEngine:
    """One engine core with Baton's KV connector. `model_path`: a checkpoint directory or a Hugging Face name.

    `device`, `receives`, `prompt_share`, `lora`, `log_format`: see `EngineArguments`.
    """

    _worker_extension = "transfer.vllm.connector.WorkerExtension"

    def __init__(
        self,
        config: VllmEngineConfig,
        model: ModelConfig,
        channel: ChannelConfig,
        *,
        model_path: str,
        role: Role,
        replica_id: str,
        secret: str,
        host: str,
        device: str | None = None,
        receives: bool = True,
        prompt_share: float = PROMPT_SHARE,
        lora: LoraConfig | None = None,
        log_format: Literal["text", "json"] = "text",
    ) -> None:
        self._arguments = EngineArguments(
            config,
            model,
            channel,
            model_path,
            role,
            replica_id,
            secret,
            host,
            device,
            receives,
            prompt_share,
            lora,
            log_format,
        )
        self._adapters = Adapters(lora.max_cpu_loras if lora else 0)
        self._client: AsyncMPClient | None = None
        self._total_blocks = 0
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._counts = Counts()
        self._events = KVEvents(config.block_size)

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        with names_until_started():
            try:
                self._client = client = await loop.run_in_executor(None, self._launch)
                await self._rpc("check_health")  # an answer: every socket is connected
            except (RuntimeError, TypeError, ValueError, TimeoutError) as error:
                raise EngineError(f"the engine did not start: {str(error) or repr(error)}") from error
        self._events.drain()  # this subscribes: the engine's publisher is up
        endpoints = tuple(await self._endpoints())
        info = describe(client.vllm_config, self._arguments.fingerprint(), endpoints, self._arguments.device)
        self._total_blocks = info.total_blocks
        return info

    def _launch(self) -> AsyncMPClient:
        config = self._arguments.vllm_config(self._transfer(), self._worker_extension, self._events)
        client = AsyncMPClient(config, Executor.get_class(config), log_stats=True)
        assert client.resources.output_queue_task is None, "its decoder is in use"
        client.decoder = OutputsDecoder()
        return client

    def _transfer(self) -> KVTransferConfig:
        return self._arguments.baton_transfer()

    async def _endpoints(self) -> list[str]:
        return await self._rpc("baton_endpoint")

    async def add(self, frames: tuple[bytes, ...]) -> None:
        await self._add(self._decoded(frames))

    def hashes(self, frames: tuple[bytes, ...]) -> tuple[int, ...]:
        return prompt_hashes(self._decoded(frames), self._arguments.config.block_size)

    async def bring(self, bring: Bring) -> None:
        await self._add(brought(self._decoded(bring.request), bring))

    def _decoded(self, frames: tuple[bytes, ...]) -> EngineCoreRequest:
        try:
            request: EngineCoreRequest = self._decoder.decode(list(frames))
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise RequestRefused(f"the request cannot be read: {error}") from error
        return request

    async def _add(self, request: EngineCoreRequest) -> None:
        try:
            await self._adapters.load(self._engine, request)
            await self._engine.add_request_async(request)
        except EngineDeadError as error:
            raise EngineError("the engine is dead") from error

    async def pin(
        self, request_id: str, keep: Collection[str], pin: Pin | None = None, source: ReplicaInfo | None = None
    ) -> None:
        await self._add(pin_request(request_id, keep, pin, source))

    async def abort(self, request_ids: list[str]) -> None:
        try:
            await self._engine.abort_requests_async(request_ids)
        except EngineDeadError as error:
            raise EngineError("the engine is dead") from error
        self._adapters.over(request_ids)

    async def step(self) -> Step:
        try:
            outputs = await self._engine.get_output_async()
        except EngineDeadError as error:
            raise await self._death() from error
        steps: tuple[StepSample, ...] = ()
        if outputs.scheduler_stats is not None:
            steps = self._counts.observe(outputs.scheduler_stats, self._total_blocks, len(self._events.log))
        came = tuple(self._output(seen(output), (output, outputs)) for output in outputs.outputs)
        return Step(came, self._counts.load, steps)

    async def _death(self) -> EngineError:
        """Why the engine is dead. One that was killed from outside, also for want of memory, has not crashed."""
        processes = self._engine.resources.engine_manager.processes
        deadline_s = time.monotonic() + EXIT_S
        while any(process.exitcode is None for process in processes) and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if any(process.exitcode in (-signal.SIGKILL, -signal.SIGTERM) for process in processes):
            return EngineError("the engine was killed")
        return EngineCrashed("the engine crashed")

    def _output(self, output: Seen, payload: tuple[msgspec.Raw, Unread]) -> Output:
        """`payload`: the output as it came, and its message."""
        self._counts.output(output)
        is_over = output.finish_reason is not None
        if is_over:
            self._adapters.over([output.request_id])
        return Output(output.request_id, len(output.new_token_ids), is_over, payload)

    def cache_change(self, whole: bool) -> CacheChange | None:
        self._events.drain()
        return self._events.log.change(whole)

    def adapters(self) -> HeldAdapters:
        return self._adapters.held

    def encode(self, payloads: list[Any]) -> list[bytes]:
        return passed_on([output for output, _ in payloads], payloads[0][1])

    async def meet(self, peers: Sequence[tuple[str, ...]]) -> None:
        await self._rpc("baton_meet", self._arguments.receives, [list(workers) for workers in peers])

    async def counters(self) -> dict[str, float]:
        totals: dict[str, float] = dict(self._counts.totals)
        workers = await self._rpc("baton_counters")
        for worker in workers:
            for name, value in worker.items():
                # The tiers of several workers load and store at the same time, each its part of every block.
                share = len(workers) if name.startswith("tier_") and not name.endswith(SUMMED) else 1
                totals[name] = totals.get(name, 0) + value / share
        return totals

    async def spans(self, session_ids: list[str]) -> list[WorkerSpans]:
        return [(float(now_s), dict(found)) for now_s, found in await self._rpc("baton_spans", session_ids)]

    async def forget(self) -> bool:
        """Empty the engine's prefix cache, and not its tiers. False: a request is running, and all is as it was."""
        return bool(await self._engine.reset_prefix_cache_async())

    async def shutdown(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            timeout_s = TIERS_SHUTDOWN_S if self._arguments.tiers() else None
            await asyncio.get_running_loop().run_in_executor(None, client.shutdown, timeout_s)
        self._events.close()

    @property
    def _engine(self) -> AsyncMPClient:
        if self._client is None:
            raise EngineError("the engine is not running")
        return self._client

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        call = self._engine.collective_rpc_async(method, args=arguments)
        return await asyncio.wait_for(call, RPC_TIMEOUT_S)
