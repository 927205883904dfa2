"""What a mock engine says of itself once it is up."""

from __future__ import annotations

from configs.schema import MockEngineConfig
from deployments.engine.mock.memory import KV_BYTES
from deployments.engine.mock.scheduler import steps_of
from deployments.engine.protocol import EngineInfo


def describe(config: MockEngineConfig, fingerprint: str, max_model_len: int, endpoint: str) -> EngineInfo:
    """`endpoint`: the control address of its KV channel."""
    return EngineInfo(
        fingerprint=fingerprint,
        block_size=config.block_size,
        total_blocks=config.num_blocks,
        max_sessions=config.max_num_seqs,
        max_model_len=max_model_len,
        endpoints=(endpoint,),
        chunk_tokens=config.max_num_batched_tokens,
        kv_bytes_per_token=config.num_layers * KV_BYTES,
        prior=tuple(steps_of(config)),
    )
