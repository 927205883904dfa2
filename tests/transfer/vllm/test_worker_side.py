"""The KV layout of a worker's cache tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transfer.vllm.worker_side import kv_layout, stages_of

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 8


def test_the_layout_is_that_of_the_tensors() -> None:
    caches = [torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16) for _ in range(3)]
    layout = kv_layout(caches, TOKENS, {"model": "m"}, 1, 2, 2 * HEADS)
    assert (layout.num_layers, layout.regions_per_layer, layout.num_blocks, layout.block_size) == (3, 1, BLOCKS, TOKENS)
    assert layout.block_bytes == HEADS * TOKENS * CONTENT * 2
    assert layout.bases == tuple(cache.data_ptr() for cache in caches)
    assert (layout.device, layout.rank, layout.workers, layout.total_heads) == ("cpu", 1, 2, 2 * HEADS)
    assert layout.heads_first
    assert layout.facts["model"] == "m"
    assert layout.facts["kv_strides"] == "heads first"


def test_a_worker_of_a_stage_has_the_layers_of_its_stage() -> None:
    """The fourth of two stages of two: the second half of the heads of the last layers."""
    caches = [torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) for _ in range(3)]
    layout = kv_layout(caches, TOKENS, {}, 3, 4, 2 * HEADS, (4, 3))
    assert (layout.layers, layout.total_layers) == (range(4, 7), 7)
    assert layout.heads == range(HEADS, 2 * HEADS)
    assert layout.heads_first
    with pytest.raises(ValueError, match="3 layers in worker 0 of stages"):
        kv_layout(caches, TOKENS, {}, 0, 4, 2 * HEADS, (4, 3))


@pytest.mark.parametrize(("stages", "found"), [(1, ()), (2, (4, 3)), (3, (2, 3, 2)), (7, (1,) * 7)])
def test_layers_are_divided_as_vllm_divides_them(stages: int, found: tuple[int, ...]) -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 7),
    )
    assert stages_of(config) == found


def test_heads_that_lie_inside_of_tokens_are_named_by_their_strides() -> None:
    cache = torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT).transpose(1, 2)
    layout = kv_layout([cache], TOKENS, {}, 0, 1, HEADS)
    assert not layout.heads_first
    assert layout.facts["kv_strides"] == str(cache.stride()[1:])


def test_a_kv_cache_of_another_dtype_or_size_of_head_is_another_fact() -> None:
    facts = {
        kv_layout([cache], TOKENS, {}, 0, 1, HEADS).facts["kv_cache"]
        for cache in (
            torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT),
            torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.float16),
            torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT),
        )
    }
    assert len(facts) == 3


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ([torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT), torch.zeros(BLOCKS, HEADS, TOKENS, 1)], "unlike KV caches"),
        ([torch.zeros(HEADS, BLOCKS, TOKENS, CONTENT).transpose(0, 1)], "do not lie together"),
        ([torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., :CONTENT]], "do not lie together"),
        ([torch.zeros(2 * BLOCKS, HEADS, TOKENS, CONTENT)[::2]], "do not lie together"),
    ],
    ids=["layers", "heads outside of blocks", "gaps", "every second block"],
)
def test_caches_that_cannot_be_carried_are_refused(caches: list[torch.Tensor], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kv_layout(caches, TOKENS, {}, 0, 1, HEADS)
