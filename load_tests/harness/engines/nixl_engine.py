"""An engine core as `deployments/engine/vllm` starts it, with one of vLLM's NIXL connectors instead of Baton's."""

from __future__ import annotations

from pathlib import Path

from vllm.config import KVTransferConfig

from configs.schema import ChannelConfig, ModelConfig, VllmEngineConfig
from deployments.engine.protocol import Engine
from deployments.engine.vllm.engine import VllmEngine
from deployments.messages import Role

ENGINE_TTL_S = 86400.0


class NixlEngine(VllmEngine):
    """`connector`: a class in `nixl_connectors.py`. `port`: the port of vLLM's handshakes, one per engine."""

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

    async def _endpoints(self) -> list[str]:
        return []  # Baton's channel does not run here

    def _transfer(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector=self._connector,
            kv_connector_module_path="load_tests.harness.engines.nixl_connectors",
            kv_role="kv_producer" if self._arguments.role is Role.PREFILL else "kv_consumer",
            kv_load_failure_policy="fail",
            engine_id=self.name,
            kv_buffer_device="cpu",
            kv_connector_extra_config={
                "trace_dir": self._arguments.channel.trace_dir,
                "trace_name": self.name,
                "side_channel_port": self.port,
                "engine_ttl": ENGINE_TTL_S,  # long, so that a paused pair needs no new handshake
            },
        )


def settings(engine: Engine) -> dict[str, str]:
    """The settings that vLLM derived from a started engine's arguments, and that must be equal in compared engines."""
    assert isinstance(engine, VllmEngine)
    config = engine._engine.vllm_config
    scheduler = config.scheduler_config
    return {
        "model": Path(config.model_config.model).name,
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
