"""A real engine core: vLLM's V1 engine core in processes of its own, without a frontend.

One of the four files that import vllm. What it relies on is checked by tests/deployments/engine/test_vllm_contract.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.version import __version__ as vllm_version

from configs.schema import ChannelConfig, ModelConfig, VllmEngineConfig
from deployments.engine.protocol import EngineError, EngineInfo, EngineLoad, Output, Step
from deployments.messages import Role

RPC_TIMEOUT_S = 10.0

# One worker needs no process of its own: that saves a process, an import and the spinning on a shared-memory queue
# between the two. Named by its path, as vLLM replaces the short name "uni" by "mp" on CPU (there for OpenMP's
# settings, which our replicas' environment holds).
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class VllmEngine:
    """One engine core with Baton's KV connector. `model_path`: a checkpoint directory or a Hugging Face name."""

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
    ) -> None:
        self._config, self._model, self._channel = config, model, channel
        self._model_path, self._role, self._replica_id = model_path, role, replica_id
        self._secret, self._host = secret, host
        self._client: AsyncMPClient | None = None
        self._total_blocks = 0
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()
        self._totals = dict.fromkeys(COUNTERS, 0.0)
        self._load = EngineLoad()

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        try:
            client = await loop.run_in_executor(None, self._launch)
        except (RuntimeError, TypeError, ValueError, TimeoutError) as error:
            raise EngineError(f"the engine did not start: {error}") from error
        self._client = client
        vllm_config = client.vllm_config
        self._total_blocks = int(vllm_config.cache_config.num_gpu_blocks or 0)
        endpoints = await self._rpc("baton_endpoint")
        return EngineInfo(
            fingerprint=self._fingerprint(),
            block_size=int(vllm_config.cache_config.block_size),
            total_blocks=self._total_blocks - 1,  # vLLM keeps one block as the null block
            max_sessions=int(vllm_config.scheduler_config.max_num_seqs),
            max_model_len=int(vllm_config.model_config.max_model_len),
            endpoints=tuple(endpoints),
        )

    def _launch(self) -> AsyncMPClient:
        config, role = self._config, self._role
        transfer = KVTransferConfig(
            kv_connector="BatonConnector",
            kv_connector_module_path="transfer.connector",
            kv_role="kv_producer" if role is Role.PREFILL else "kv_consumer",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                "secret": self._secret,
                "host": self._host,
                "replica_id": self._replica_id,
                "backend": self._channel.backend,
                "transports": self._channel.transports,
                "handoff_timeout_s": self._channel.handoff_timeout_s,
                "fingerprint": self._fingerprint(),
                "trace_dir": self._channel.trace_dir,
            },
        )
        optional = {
            "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "quantization": config.quantization,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        arguments = AsyncEngineArgs(
            model=self._model_path,
            dtype=self._model.dtype,
            max_model_len=config.max_model_len or self._model.max_model_len,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=True,
            worker_extension_cls="transfer.connector.WorkerExtension",
            kv_transfer_config=transfer,
            distributed_executor_backend=IN_PROCESS if config.tensor_parallel_size == 1 else "mp",
            **{name: value for name, value in optional.items() if value is not None},
            **config.engine_args,
        )
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        return AsyncMPClient(vllm_config, Executor.get_class(vllm_config), log_stats=True)

    def _fingerprint(self) -> str:
        """What must agree for two replicas to exchange KV. Weights may be quantised on one side: KV is the same."""
        facts: dict[str, Any] = {
            "model": self._model.source,
            "dtype": self._model.dtype,
            "kv_cache_dtype": self._config.engine_args.get("kv_cache_dtype", "auto"),
            "block_size": self._config.block_size,
            "vllm": vllm_version,
        }
        checkpoint = Path(self._model_path) / "config.json"
        if checkpoint.is_file():
            facts["checkpoint"] = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    async def add(self, frames: tuple[bytes, ...]) -> None:
        request = self._decoder.decode(list(frames))
        try:
            await self._engine.add_request_async(request)
        except EngineDeadError as error:
            raise EngineError("the engine is dead") from error

    async def abort(self, request_ids: list[str]) -> None:
        try:
            await self._engine.abort_requests_async(request_ids)
        except EngineDeadError as error:
            raise EngineError("the engine is dead") from error

    async def step(self) -> Step:
        try:
            outputs = await self._engine.get_output_async()
        except EngineDeadError as error:
            raise EngineError("the engine died") from error
        if outputs.scheduler_stats is not None:
            self._load = self._observe(outputs.scheduler_stats)
        return Step(tuple(self._output(output) for output in outputs.outputs), self._load)

    def _output(self, output: EngineCoreOutput) -> Output:
        if (stats := output.prefill_stats) is not None:
            self._totals["prompt_tokens"] += stats.num_prompt_tokens
            self._totals["computed_tokens"] += stats.num_computed_tokens
        self._totals["generated_tokens"] += len(output.new_token_ids)
        return Output(output.request_id, len(output.new_token_ids), output.finished, output)

    def _observe(self, stats: SchedulerStats) -> EngineLoad:
        local, remote = stats.prefix_cache_stats, stats.connector_prefix_cache_stats
        self._totals["cached_tokens"] += local.hits
        self._totals["preemptions"] += local.preempted_requests
        self._totals["loaded_tokens"] += remote.hits if remote is not None else 0
        return EngineLoad(
            used_blocks=round(stats.kv_cache_usage * (self._total_blocks - 1)),
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            counters=dict(self._totals),
        )

    def encode(self, payloads: list[Any]) -> list[bytes]:
        return [bytes(frame) for frame in self._encoder.encode(EngineCoreOutputs(outputs=payloads))]

    async def counters(self) -> dict[str, float]:
        totals: dict[str, float] = dict(self._totals)
        for worker in await self._rpc("baton_counters"):
            for name, value in worker.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    async def shutdown(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await asyncio.get_running_loop().run_in_executor(None, client.shutdown)

    @property
    def _engine(self) -> AsyncMPClient:
        if self._client is None:
            raise EngineError("the engine is not running")
        return self._client

    async def _rpc(self, method: str) -> list[Any]:
        return await asyncio.wait_for(self._engine.collective_rpc_async(method), RPC_TIMEOUT_S)


COUNTERS = (
    "prompt_tokens",
    "computed_tokens",
    "cached_tokens",
    "loaded_tokens",
    "generated_tokens",
    "preemptions",
)
