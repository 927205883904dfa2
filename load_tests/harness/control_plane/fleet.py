"""The replicas of the control plane in one process, their configuration, and how to wait for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from configs.schema import BatonConfig, ChannelConfig, MockEngineConfig, ModelConfig, PlacementConfig, PoolConfig

WAIT_S = 30.0
"""The longest time in which a request may wait, and in which a handoff may take place, as configured."""
PATIENCE_S = 90.0
"""The longest time that a test waits for an effect that it has caused."""
BLOCKS = {"prefill": 256, "decode-small": 144, "decode-large": 288}
PREFILL, SMALL, LARGE = "prefill-0", "decode-small-0", "decode-large-0"
REPLICAS = {PREFILL: "prefill", SMALL: "decode-small", LARGE: "decode-large"}
MAX_MODEL_LEN = 512


def config(engine: dict[str, Any] | None = None, scale: int = 1, **placement: Any) -> BatonConfig:
    """One prefill pool and two different decode pools of fast mock engines, with `scale` times the blocks."""
    base = MockEngineConfig(
        block_size=4,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        num_layers=3,
        step_s=0.001,
        prefill_tokens_per_s=1e6,
    ).model_copy(update=engine or {})
    engines = {pool: base.model_copy(update={"num_blocks": scale * blocks}) for pool, blocks in BLOCKS.items()}
    pools = {pool: PoolConfig(engine=engine) for pool, engine in engines.items()}
    times = {"split": "always", "queue_timeout_s": WAIT_S, "session_timeout_s": 2 * WAIT_S, "snapshot_interval_s": 0.01}
    return BatonConfig(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN),
        prefill=pools["prefill"],
        decode={"small": pools["decode-small"], "large": pools["decode-large"]},
        channel=ChannelConfig(kind="in_process", handoff_timeout_s=WAIT_S),
        placement=PlacementConfig(**{**times, **placement}),
    )


async def until(look: Callable[[], Awaitable[Any]], wait_s: float = PATIENCE_S) -> Any:
    """Call `look` until its answer is true, for at most `wait_s`. Returns that answer."""
    async with asyncio.timeout(wait_s):
        while not (seen := await look()):  # noqa: ASYNC110 - most of what is looked at has no event
            await asyncio.sleep(0.002)
    return seen


async def left_after(wait_s: float, look: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Call `look` until it finds nothing, for at most `wait_s`. Returns what it has found last."""
    left: dict[str, Any] = {}

    async def finds_nothing() -> bool:
        nonlocal left
        left = await look()
        return not left

    with contextlib.suppress(TimeoutError):
        await until(finds_nothing, wait_s)
    return left
