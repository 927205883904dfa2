"""The KV layout of a worker's cache tensors."""

from __future__ import annotations

import pytest
import torch

from transfer.vllm.worker_side import kv_layout

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
