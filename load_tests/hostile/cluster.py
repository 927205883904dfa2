"""The cluster under attack: its configuration and its replicas."""

from __future__ import annotations

from configs.schema import BatonConfig, ChannelConfig, MockEngineConfig, ModelConfig, PlacementConfig, PoolConfig

REPLICAS = ("prefill-0", "decode-main-0", "decode-main-1")
MODEL = "mock"
STEP_S = 0.02


def settings() -> BatonConfig:
    """One prefill and one decode pool of engines whose steps hardly cost CPU. All prompts are split."""
    engine = MockEngineConfig(computes=False, step_s=STEP_S, num_blocks=4096, max_num_seqs=256)
    return BatonConfig(
        model=ModelConfig(name=MODEL, max_model_len=2048),
        prefill=PoolConfig(engine=engine),
        decode={"main": PoolConfig(engine=engine)},
        channel=ChannelConfig(kind="in_process"),
        placement=PlacementConfig(split="always"),
    )
