"""An engine core as `deployments/engine/vllm.py` starts it, with one of vLLM's NIXL connectors in place of ours."""

from __future__ import annotations

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.executor import Executor

from configs.schema import ChannelConfig, ModelConfig, VllmEngineConfig
from deployments.engine.vllm import IN_PROCESS, VllmEngine
from deployments.messages import Role

ENGINE_TTL_S = 86400.0


class NixlEngine(VllmEngine):
    """`connector`: a class of `load_tests.engines.nixl_connectors`. `port`: of vLLM's handshakes, one per engine."""

    def __init__(
        self,
        config: VllmEngineConfig,
        model: ModelConfig,
        channel: ChannelConfig,
        *,
        model_path: str,
        role: Role,
        name: str,
        connector: str,
        port: int,
    ) -> None:
        super().__init__(
            config, model, channel, model_path=model_path, role=role, replica_id=name, secret="", host="127.0.0.1"
        )
        self.name, self.port, self._connector = name, port, connector

    def _launch(self) -> AsyncMPClient:
        config = self._config
        transfer = KVTransferConfig(
            kv_connector=self._connector,
            kv_connector_module_path="load_tests.engines.nixl_connectors",
            kv_role="kv_producer" if self._role is Role.PREFILL else "kv_consumer",
            kv_load_failure_policy="fail",
            engine_id=self.name,
            kv_buffer_device="cpu",
            kv_connector_extra_config={
                "trace_dir": self._channel.trace_dir,
                "trace_name": self.name,
                "side_channel_port": self.port,
                "engine_ttl": ENGINE_TTL_S,  # a pause must not cost a handshake
            },
        )
        # Argument for argument what VllmEngine passes; the benchmark compares what vLLM makes of both.
        arguments = AsyncEngineArgs(
            model=self._model_path,
            dtype=self._model.dtype,
            max_model_len=config.max_model_len or self._model.max_model_len,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tensor_parallel_size,
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=True,
            worker_extension_cls="load_tests.engines.nixl_connectors.NoChannel",
            kv_transfer_config=transfer,
            distributed_executor_backend=IN_PROCESS,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        return AsyncMPClient(vllm_config, Executor.get_class(vllm_config), log_stats=True)


def settings(engine: VllmEngine) -> dict[str, str]:
    """What vLLM has made of a started engine's arguments: of that which must be alike to compare two."""
    config = engine._engine.vllm_config
    scheduler = config.scheduler_config
    return {
        "model": str(config.model_config.model),
        "dtype": str(config.model_config.dtype),
        "max_model_len": str(config.model_config.max_model_len),
        "eager": str(config.model_config.enforce_eager),
        "block_size": str(config.cache_config.block_size),
        "blocks": str(config.cache_config.num_gpu_blocks),
        "prefix_caching": str(config.cache_config.enable_prefix_caching),
        "chunk_tokens": str(scheduler.max_num_batched_tokens),
        "max_num_seqs": str(scheduler.max_num_seqs),
        "async_scheduling": str(scheduler.async_scheduling),
        "executor": str(config.parallel_config.distributed_executor_backend),
    }
