"""A real engine core: vLLM's V1 engine core in processes of its own, without a frontend.

One of the seven files that import vllm. What it relies on is checked by tests/deployments/engine/test_vllm_contract.py.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from vllm.config import KVEventsConfig, KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_open_port
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.version import __version__ as vllm_version

from configs.schema import ChannelConfig, ModelConfig, VllmEngineConfig
from deployments.engine.kv_events import KVEvents
from deployments.engine.names import names_until_started
from deployments.engine.protocol import EngineError, EngineInfo, EngineLoad, Output, Step
from deployments.messages import CacheChange, Role, StepSample
from deployments.policy.prediction.step_time import ModelShape, roofline
from deployments.policy.prompt_share import prompt_share
from transfer.vllm.continued_answer import AnsweredRequests, count_answered
from transfer.vllm.lifeline import die_with_parent
from transfer.vllm.step_clock import StepClock

logger = logging.getLogger("baton.engine")

RPC_TIMEOUT_S = 10.0
RELEASE_AGAIN_S = 0.02

# One worker needs no process of its own: that saves a process, an import and the spinning on a shared-memory queue
# between the two. Named by its path, as vLLM replaces the short name "uni" by "mp" on CPU (there for OpenMP's
# settings, which our replicas' environment holds).
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class VllmEngine:
    """One engine core with Baton's KV connector. `model_path`: a checkpoint directory or a Hugging Face name.

    `device`: whose data sheet gives the first guess of its speed; none: what vLLM says it runs on.
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
    ) -> None:
        self._device = device
        self._config, self._model, self._channel = config, model, channel
        self._model_path, self._role, self._replica_id = model_path, role, replica_id
        self._secret, self._host = secret, host
        self._client: AsyncMPClient | None = None
        self._total_blocks = 0
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()
        self._totals = dict.fromkeys(COUNTERS, 0.0)
        self._load = EngineLoad()
        self._events = KVEvents(config.block_size)

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        with names_until_started():
            try:
                self._client = client = await loop.run_in_executor(None, self._launch)
                await self._rpc("check_health")  # an answer: every socket is connected
            except (RuntimeError, TypeError, ValueError, TimeoutError) as error:
                raise EngineError(f"the engine did not start: {str(error) or repr(error)}") from error
        self._events.drain()  # which subscribes: the engine's publisher is up
        vllm_config = client.vllm_config
        self._total_blocks = int(vllm_config.cache_config.num_gpu_blocks or 0)
        return EngineInfo(
            fingerprint=self._fingerprint(),
            block_size=int(vllm_config.cache_config.block_size),
            total_blocks=self._total_blocks - 1,  # vLLM keeps one block as the null block
            max_sessions=int(vllm_config.scheduler_config.max_num_seqs),
            max_model_len=int(vllm_config.model_config.max_model_len),
            endpoints=tuple(await self._endpoints()),
            chunk_tokens=_chunk_tokens(vllm_config.scheduler_config),
            kv_bytes_per_token=_kv_bytes_per_token(vllm_config),
            prior=_prior(vllm_config, self._device),
        )

    async def _endpoints(self) -> list[str]:
        return await self._rpc("baton_endpoint")

    def _transfer(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="BatonConnector",
            kv_connector_module_path="transfer.vllm.connector",
            kv_role=self._kv_role,
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                "secret": self._secret,
                "host": self._host,
                "replica_id": self._replica_id,
                "backend": self._channel.backend,
                "transports": self._channel.transports,
                "handoff_timeout_s": self._channel.handoff_timeout_s,
                "facts": self._facts(),
                "limits": self._channel.pacing.model_dump(),
                "trace_dir": self._channel.trace_dir,
            },
        )

    @property
    def _kv_role(self) -> Literal["kv_producer", "kv_consumer"]:
        return "kv_producer" if self._role is Role.PREFILL else "kv_consumer"

    def _launch(self) -> AsyncMPClient:
        config = self._config
        if not config.enforce_eager and current_platform.is_cpu() and not shutil.which(os.environ.get("CXX", "g++")):
            raise ValueError("`enforce_eager: false` on CPU needs a C++ compiler: g++, or what CXX names")
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
            worker_extension_cls=self._worker_extension,
            kv_transfer_config=self._transfer(),
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=self._events.endpoint,
                topic=self._events.topic,
                buffer_steps=1,  # for a replay, which nobody asks for
            ),
            distributed_executor_backend=IN_PROCESS if config.tensor_parallel_size == 1 else "mp",
            **{name: value for name, value in optional.items() if value is not None},
            **config.engine_args,
        )
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if "long_prefill_token_threshold" not in config.engine_args:
            scheduler = vllm_config.scheduler_config
            scheduler.long_prefill_token_threshold = prompt_share(
                self._role, scheduler.max_num_batched_tokens, scheduler.max_num_seqs
            )
        return AsyncMPClient(vllm_config, Executor.get_class(vllm_config), log_stats=True)

    def _facts(self) -> dict[str, str]:
        """What must agree for two replicas to exchange KV. Weights may be quantised on one side: KV is the same."""
        facts = {
            "model": self._model.source,
            "dtype": self._model.dtype,
            "kv_cache_dtype": str(self._config.engine_args.get("kv_cache_dtype", "auto")),
            "block_size": str(self._config.block_size),
            "revision": str(self._config.engine_args.get("revision")),
            "channel": self._channel.kind,
            "vllm": vllm_version,
        }
        checkpoint = Path(self._model_path) / "config.json"
        if checkpoint.is_file():
            facts["checkpoint"] = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
        return facts

    def _fingerprint(self) -> str:
        """Replicas with the same one can exchange KV."""
        return hashlib.sha256(json.dumps(self._facts(), sort_keys=True).encode()).hexdigest()[:16]

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
        steps: tuple[StepSample, ...] = ()
        if outputs.scheduler_stats is not None:
            steps = _steps(outputs.scheduler_stats)
            self._load = self._observe(outputs.scheduler_stats, sum(step.decode_context for step in steps))
        return Step(tuple(self._output(output) for output in outputs.outputs), self._load, steps)

    def _output(self, output: EngineCoreOutput) -> Output:
        if (stats := output.prefill_stats) is not None:
            self._totals["prompt_tokens"] += stats.num_prompt_tokens
            self._totals["computed_tokens"] += stats.num_computed_tokens
        self._totals["generated_tokens"] += len(output.new_token_ids)
        return Output(output.request_id, len(output.new_token_ids), output.finished, output)

    def _observe(self, stats: SchedulerStats, running_tokens: int) -> EngineLoad:
        local, remote = stats.prefix_cache_stats, stats.connector_prefix_cache_stats
        self._totals["cached_tokens"] += local.hits
        self._totals["preemptions"] += local.preempted_requests
        self._totals["loaded_tokens"] += remote.hits if remote is not None else 0
        return EngineLoad(
            used_blocks=round(stats.kv_cache_usage * (self._total_blocks - 1)),
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            cached_blocks=len(self._events.log),
            running_tokens=running_tokens,
            counters=dict(self._totals),
        )

    def cache_change(self, whole: bool) -> CacheChange | None:
        self._events.drain()
        return self._events.log.change(whole)

    def encode(self, payloads: list[Any]) -> list[bytes]:
        return [bytes(frame) for frame in self._encoder.encode(EngineCoreOutputs(outputs=payloads))]

    async def meet(self, peers: Sequence[tuple[str, ...]]) -> None:
        await self._rpc("baton_meet", str(self._role), [list(workers) for workers in peers])

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
        self._events.close()

    @property
    def _engine(self) -> AsyncMPClient:
        if self._client is None:
            raise EngineError("the engine is not running")
        return self._client

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        call = self._engine.collective_rpc_async(method, args=arguments)
        return await asyncio.wait_for(call, RPC_TIMEOUT_S)


COUNTERS = (
    "prompt_tokens",
    "computed_tokens",
    "cached_tokens",
    "loaded_tokens",
    "generated_tokens",
    "preemptions",
)


def _chunk_tokens(scheduler: SchedulerConfig) -> int:
    """Tokens of one prompt that a step takes beside others."""
    return int(min(scheduler.long_prefill_token_threshold or math.inf, scheduler.max_num_batched_tokens))


def _kv_bytes_per_token(config: VllmConfig) -> int:
    """Over all layers and workers, of a model whose layers all keep keys and values; in the cache's own type."""
    model, name = config.model_config, config.cache_config.cache_dtype
    value_bytes = model.dtype.itemsize if name == "auto" else 1 if name.startswith("fp8") else 2
    heads, layers = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
    return int(2 * layers * heads * model.get_head_size() * value_bytes)


def _prior(config: VllmConfig, device: str | None) -> tuple[float, ...]:
    """What the hardware makes of a step; nothing where the model is of another shape."""
    model, text = config.model_config, config.model_config.hf_text_config
    if not hasattr(text, "intermediate_size"):
        return ()
    shape = ModelShape(
        layers=model.get_total_num_hidden_layers(),
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=text.num_attention_heads,
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        vocab=model.get_vocab_size(),
        bytes_per_weight=model.dtype.itemsize,
        kv_bytes_per_value=model.dtype.itemsize,
    )
    name = device or ("cpu" if current_platform.is_cpu() else current_platform.get_device_name())
    # A plain tuple: the session manager may be of another version, and unpickles no class that it does not know.
    return tuple(roofline(shape, name, config.parallel_config.tensor_parallel_size).coefficients())


def _steps(stats: SchedulerStats) -> tuple[StepSample, ...]:
    """The step that an engine's statistics tell of, as its connector saw it (`transfer.vllm.step_clock`)."""
    step = (stats.kv_connector_stats or {}).get("step")
    return () if step is None else (StepSample(*step),)


class PullEngine(VllmEngine):
    """One engine core with vLLM's own NIXL connector: decode reads the KV cache when prefill is over.

    Prefill's last output names its blocks, and they are held until decode has read them. That request is therefore
    not finished here: aborting it lets go of blocks that nobody will read.
    """

    _worker_extension = "deployments.engine.vllm.engine.PullWorker"

    async def _endpoints(self) -> list[str]:
        return []

    def _transfer(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="deployments.engine.vllm.engine",
            kv_role=self._kv_role,
            kv_buffer_device=current_platform.device_type,
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                "backends": [self._channel.backend],
                # How long prefill holds blocks that decode never asks for; while decode waits, it renews this.
                "kv_lease_duration": math.ceil(self._channel.handoff_timeout_s),
                "transports": self._channel.transports,
                "host": self._host,
            },
        )

    def _output(self, output: EngineCoreOutput) -> Output:
        taken = super()._output(output)
        held = (output.kv_transfer_params or {}).get("do_remote_prefill", False)
        return replace(taken, finished=taken.finished and not held)

    async def abort(self, request_ids: list[str]) -> None:
        await super().abort(request_ids)
        if self._role is Role.PREFILL:
            await self._release(request_ids)

    async def _release(self, request_ids: list[str]) -> None:
        """Again until the workers know nothing of the requests: a lease begins one step after its request's end."""
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                while any(await self._rpc("baton_release", request_ids)):  # noqa: ASYNC110 - nothing tells us
                    await asyncio.sleep(RELEASE_AGAIN_S)
        except TimeoutError:
            logger.warning("blocks of %s stay held until their lease is over", request_ids)
        except EngineDeadError as error:
            raise EngineError("the engine is dead") from error

    async def meet(self, peers: Sequence[tuple[str, ...]]) -> None:
        """vLLM's connector makes a connection when decode first pulls from a prefill replica."""

    async def counters(self) -> dict[str, float]:
        return dict(self._totals)


class PullWorker:
    """Methods that vLLM mixes into its workers, so that a replica can ask them by `collective_rpc`."""

    def baton_release(self, request_ids: list[str]) -> int:
        """End the leases on prefilled blocks; the number of requests that the connector still knows."""
        worker = get_kv_transfer_group().connector_worker
        for request_id in request_ids:
            if request_id in worker._reqs_to_send:
                worker._reqs_to_send[request_id] = 0.0  # a time that is over; the next step frees the blocks
        return sum(request_id in worker._reqs_to_process for request_id in request_ids)


class NixlConnector(NixlPullConnector):
    """vLLM's connector, told by our configuration what it takes from the environment of its (the engine's) process.

    It keeps its name: by it vLLM prepares the caches of some models.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        die_with_parent()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        if extra["transports"]:
            os.environ["UCX_TLS"] = extra["transports"]
        # The side channel is read and opened by the scheduler's half only: a port of its own, free at this moment.
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = extra["host"]
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(get_open_port())
        cores = os.sched_getaffinity(0)
        if current_platform.is_cpu() and role is KVConnectorRole.WORKER:
            # NIXL's progress thread spins on a whole core, and vLLM has no setting against it. On CPU that core is
            # the model's; without the thread, transfers progress in the engine's steps, which go on while one is open.
            base_worker.nixl_agent_config = functools.partial(base_worker.nixl_agent_config, enable_prog_thread=False)
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._clock, self._answered = StepClock(), AnsweredRequests()
        else:
            count_answered(vllm_config)
        # On CPU vLLM has just pinned this thread, the one that computes the model, to the node's last core.
        os.sched_setaffinity(0, cores)

    def on_new_request(self, request: Request) -> None:
        self._answered.begin(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._answered.is_ready(request):
            return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._clock.begin(scheduler_output, time.monotonic())
        return super().build_connector_meta(scheduler_output)

    def get_kv_connector_stats(self) -> Any:
        """The step that just ended. What vLLM's connector counts in the workers is left out: the two do not add up."""
        return self._clock.end(time.monotonic()) if self._role is KVConnectorRole.SCHEDULER else None
