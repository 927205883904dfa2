"""What one vLLM engine core is started with, made from the configuration of a pool."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm.config import KVEventsConfig, KVTransferConfig, LoggingConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.version import __version__ as vllm_version

from configs.schema import ChannelConfig, LoraConfig, ModelConfig, VllmEngineConfig
from deployments.engine.kv_events import KVEvents
from deployments.engine.vllm.description import prior_of
from deployments.fleet.columns import UNKNOWN
from deployments.messages import Role
from deployments.policy.step_size import PROMPT_SHARE

# One worker needs no process of its own. That saves a process, an import and the spinning on a shared-memory queue
# between the two. It is named by its path, because vLLM replaces the short name "uni" by "mp" on CPU (for OpenMP's
# settings, which the environment of our replicas holds).
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
CPU_STAGE = "deployments.engine.vllm.cpu_worker.StageWorker"
"""The class of the workers of several pipeline stages on CPU."""


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The configuration of one replica's engine.

    `model_path`: a checkpoint directory or a Hugging Face name. `secret`: the deployment's, which seals control
    messages. `host`: the address at which peers reach the channel. `device`: whose data sheet gives the first guess of
    its speed; None: the one that vLLM says it runs on. `receives`: peers write KV to this engine, too. `prompt_share`:
    as in the configuration. `lora`: None where no adapters are served. `log_format`: `text` or `json`.
    """

    config: VllmEngineConfig
    model: ModelConfig
    channel: ChannelConfig
    model_path: str
    role: Role
    replica_id: str
    secret: str
    host: str
    device: str | None = None
    receives: bool = True
    prompt_share: float = PROMPT_SHARE
    lora: LoraConfig | None = None
    log_format: Literal["text", "json"] = "text"

    @property
    def kv_role(self) -> Literal["kv_producer", "kv_both"]:
        """vLLM's name for what the engine does with KV. Of one that receives KV, vLLM frees blocks later."""
        return "kv_both" if self.receives or self.tiers() else "kv_producer"

    def tiers(self) -> dict[str, Any] | None:
        """What `transfer.vllm.tiers.open_tiers` makes the tiers of each worker of."""
        host, disk = self.config.host_kv_bytes, self.config.disk_kv
        if not host and disk is None:
            return None
        workers = self.config.workers
        place = {"disk_path": disk.path, "disk_bytes": disk.bytes // workers} if disk else {"disk_path": None}
        return {"host_bytes": host // workers, **place}

    def vllm_config(self, transfer: KVTransferConfig, worker_extension: str, events: KVEvents) -> VllmConfig:
        """vLLM's own configuration. `worker_extension`: path of a class that vLLM mixes into its workers.

        Raises ValueError when vLLM refuses it, or when a compiler is needed and there is none.
        """
        config = self.config
        if not config.enforce_eager and current_platform.is_cpu() and not shutil.which(os.environ.get("CXX", "g++")):
            raise ValueError("`enforce_eager: false` on CPU needs a C++ compiler: g++, or what CXX names")
        arguments = AsyncEngineArgs(
            model=self.model_path,
            dtype=self.model.dtype,
            max_model_len=config.max_model_len or self.model.max_model_len,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=True,
            worker_extension_cls=worker_extension,
            kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=events.endpoint,
                topic=events.topic,
                buffer_steps=1,  # vLLM keeps these for a replay, which is not used
            ),
            distributed_executor_backend=IN_PROCESS if config.workers == 1 else "mp",
            **self._optional(),
            **config.engine_args,
        )
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if config.phases:
            vllm_config.scheduler_config.scheduler_cls = self._scheduler(vllm_config.scheduler_config.async_scheduling)
        elif "long_prefill_token_threshold" not in config.engine_args:  # else vLLM sizes its steps
            prior = prior_of(vllm_config, self.device) or tuple(UNKNOWN)
            transfer.kv_connector_extra_config["pace"] = {"prior": prior, "prompt_share": self.prompt_share}
        return vllm_config

    def _scheduler(self, is_async: bool) -> str:
        """The path of the scheduler class for phases."""
        module, name = ("choosing", "Choosing") if self.config.phases == "auto" else ("phased", "Phased")
        return f"deployments.engine.vllm.{module}_scheduler.{'Async' if is_async else ''}{name}Scheduler"

    def _optional(self) -> dict[str, Any]:
        """Arguments whose default is vLLM's own."""
        config = self.config
        optional: dict[str, Any] = {
            "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "quantization": config.quantization,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        if config.pipeline_parallel_size > 1 and current_platform.is_cpu():
            optional["worker_cls"] = CPU_STAGE
        if self.log_format == "json":
            optional["logging_config"] = LoggingConfig(formatter="json")
        if self.lora is not None:
            optional |= {"enable_lora": True} | self.lora.model_dump(exclude={"adapters"})
        return {name: value for name, value in optional.items() if value is not None}

    def baton_transfer(self) -> KVTransferConfig:
        """The configuration of Baton's own KV connector."""
        return KVTransferConfig(
            kv_connector="PacedConnector",
            kv_connector_module_path="deployments.engine.vllm.connector",
            kv_role=self.kv_role,
            kv_load_failure_policy="fail",
            kv_connector_extra_config={
                "secret": self.secret,
                "host": self.host,
                "replica_id": self.replica_id,
                "backend": self.channel.backend,
                "transports": self.channel.transports,
                "handoff_timeout_s": self.channel.handoff_timeout_s,
                "facts": self.facts(),
                "limits": self.channel.pacing.model_dump(),
                "tiers": self.tiers(),
                "trace_dir": self.channel.trace_dir,
            },
        )

    def facts(self) -> dict[str, str]:
        """What must agree for two replicas to exchange KV. Weights may be quantised on one side: KV is the same."""
        facts = {
            "model": self.model.source,
            "dtype": self.model.dtype,
            "kv_cache_dtype": str(self.config.engine_args.get("kv_cache_dtype", "auto")),
            "block_size": str(self.config.block_size),
            "revision": str(self.config.engine_args.get("revision")),
            "channel": self.channel.kind,
            "vllm": vllm_version,
        }
        checkpoint = Path(self.model_path) / "config.json"
        if checkpoint.is_file():
            facts["checkpoint"] = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
        return facts

    def fingerprint(self) -> str:
        """Replicas of the same fingerprint can exchange KV."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:16]
