"""The engine that a pool's configuration asks for, and the environment it needs."""

from __future__ import annotations

from pathlib import Path

from configs.schema import BatonConfig, VllmEngineConfig
from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, resolve
from deployments.engine.protocol import Engine, Identity
from deployments.messages import may_decode

WORKER_SHUTDOWN_S = 15.0
"""How long the workers of an engine with KV tiers get to end, where there are several of them."""


def checkpoint(config: BatonConfig) -> str:
    """The model as something vLLM can load; a bundled one is converted on this node if it is not yet."""
    return str(resolve(config.model.source, config.model.cache_dir or DEFAULT_CACHE_DIR))


def build_engine(config: BatonConfig, identity: Identity, secret: str) -> Engine:
    """The engine of one replica, not started. Heavy imports happen here, in the replica's process."""
    pool = config.pools[identity.pool]
    engine, receives = pool.engine, config.placement.fetch or may_decode(identity.role, identity.strict)
    if isinstance(engine, VllmEngineConfig):
        from deployments.engine.vllm.engine import VllmEngine
        from deployments.engine.vllm.pull import PullEngine

        kind = PullEngine if config.channel.kind == "vllm" else VllmEngine
        return kind(
            engine,
            config.model,
            config.channel,
            model_path=checkpoint(config),
            role=identity.role,
            replica_id=identity.replica_id,
            secret=secret,
            host=identity.host,
            device=pool.device or pool.resources.accelerator_type,
            receives=receives,
            prompt_share=config.placement.prompt_share,
            lora=config.lora,
            log_format=config.log_format,
        )
    from deployments.engine.mock.engine import MockEngine
    from transfer.memory.in_process_plane import InProcessPlane
    from transfer.memory.plane import Plane

    plane: Plane
    if config.channel.kind == "nixl":
        from transfer.memory.nixl_plane import NixlPlane

        plane = NixlPlane(identity.replica_id, config.channel.backend, config.channel.transports)
    else:
        plane = InProcessPlane(identity.replica_id)
    return MockEngine(
        engine,
        replica_id=identity.replica_id,
        fingerprint=f"mock-{engine.num_layers}-{engine.seed}",
        secret=secret,
        host=identity.host,
        handoff_timeout_s=config.channel.handoff_timeout_s,
        max_model_len=config.model.max_model_len,
        prompt_share=config.placement.prompt_share,
        receives=receives,
        plane=plane,
    )


def environment(config: BatonConfig, pool: str) -> dict[str, str]:
    """Environment variables of a pool's replicas, set before their process starts."""
    engine, resources = config.pools[pool].engine, config.pools[pool].resources
    variables: dict[str, str] = {}
    if isinstance(engine, VllmEngineConfig):
        if not resources.num_gpus:
            if engine.enforce_eager:
                # vLLM compiles some functions even so (log probabilities, split embeddings). Each costs a first
                # request on CPU 15 s.
                variables["TORCH_COMPILE_DISABLE"] = "1"
            else:
                # vLLM 0.32 cannot load what it stores of a model compiled for CPU, and would compile for minutes at
                # every start. Without that store, it finds what torch stores itself.
                variables["VLLM_USE_AOT_COMPILE"] = "0"
        variables |= {
            "OMP_NUM_THREADS": str(engine.omp_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "TOKENIZERS_PARALLELISM": "false",
            "NIXL_LOG_LEVEL": "WARN",
        }
        if engine.host_kv_bytes or engine.disk_kv:  # several workers drain their tiers before they end
            variables["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = f"{WORKER_SHUTDOWN_S:.0f}"
    if config.channel.net_devices:
        variables["UCX_NET_DEVICES"] = config.channel.net_devices
    return variables | offline(config) | config.pools[pool].env


def offline(config: BatonConfig) -> dict[str, str]:
    """Variables that keep vLLM from looking on the network for a model that is on this machine."""
    source = config.model.source
    return {"HF_HUB_OFFLINE": "1"} if source.startswith("bundled:") or Path(source).is_dir() else {}
