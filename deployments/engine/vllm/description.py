"""What an engine that has started tells its replica about itself."""

from __future__ import annotations

import math

from vllm.config import SchedulerConfig, VllmConfig
from vllm.platforms import current_platform

from deployments.engine.protocol import EngineInfo
from deployments.policy.prediction.step_time import ModelShape, roofline


def describe(config: VllmConfig, fingerprint: str, endpoints: tuple[str, ...], device: str | None) -> EngineInfo:
    """`device`: whose data sheet gives the first guess of the engine's speed; None: the one that vLLM names."""
    return EngineInfo(
        fingerprint=fingerprint,
        block_size=int(config.cache_config.block_size),
        total_blocks=int(config.cache_config.num_gpu_blocks or 0) - 1,  # vLLM keeps one block as the null block
        max_sessions=int(config.scheduler_config.max_num_seqs),
        max_model_len=int(config.model_config.max_model_len),
        endpoints=endpoints,
        chunk_tokens=_chunk_tokens(config.scheduler_config),
        kv_bytes_per_token=_kv_bytes_per_token(config),
        prior=prior_of(config, device),
    )


def _chunk_tokens(scheduler: SchedulerConfig) -> int:
    """The most tokens of one prompt in a step that has other requests, too."""
    return int(min(scheduler.long_prefill_token_threshold or math.inf, scheduler.max_num_batched_tokens))


def _kv_bytes_per_token(config: VllmConfig) -> int:
    """Summed over all layers and workers, in the cache's own type. Assumes that every layer keeps keys and values."""
    model, name = config.model_config, config.cache_config.cache_dtype
    value_bytes = model.dtype.itemsize if name == "auto" else 1 if name.startswith("fp8") else 2
    heads, layers = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
    return int(2 * layers * heads * model.get_head_size() * value_bytes)


def prior_of(config: VllmConfig, device: str | None) -> tuple[float, ...]:
    """The five numbers of `step_cost.Coefficients` by the hardware's data sheet; empty for a model of another shape."""
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
    return tuple(roofline(shape, name, config.parallel_config.world_size).coefficients())
