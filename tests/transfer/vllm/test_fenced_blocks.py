"""Blocks of late fetches, with vLLM's own block pool: no other request gets one while it may be written."""

from __future__ import annotations

import pytest
from vllm.v1.core.block_pool import BlockPool

from transfer.vllm.fenced_blocks import FencedBlocks

BLOCKS = 9


@pytest.fixture
def pool() -> BlockPool:
    """With eight blocks that requests can use."""
    return BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=16)


def test_blocks_are_kept_until_every_worker_that_was_late_has_stopped(pool: BlockPool) -> None:
    fenced, taken = FencedBlocks(pool), pool.get_new_blocks(6)
    mine = [block.block_id for block in taken[2:]]
    fenced.late({"r": 1})
    fenced.late({"r": 1})
    assert fenced.keep("r", mine)
    pool.free_blocks(taken)  # as vLLM does it: the request computes its prompt in other blocks
    assert (pool.get_num_free_blocks(), len(fenced)) == (4, 1)
    others = pool.get_new_blocks(4)
    assert not {block.block_id for block in others} & set(mine)
    fenced.stopped({"r": 1})
    assert (pool.get_num_free_blocks(), len(fenced)) == (0, 1)
    fenced.stopped({"r": 1})
    pool.free_blocks(others)
    assert (pool.get_num_free_blocks(), len(fenced)) == (8, 0)


def test_nothing_is_kept_of_a_fetch_that_has_ended(pool: BlockPool) -> None:
    fenced, taken = FencedBlocks(pool), pool.get_new_blocks(3)
    assert not fenced.keep("in time", [block.block_id for block in taken])
    fenced.late({"r": 1})
    fenced.stopped({"r": 1})  # before another worker has its part
    assert not fenced.keep("r", [block.block_id for block in taken])
    pool.free_blocks(taken)
    assert (pool.get_num_free_blocks(), len(fenced)) == (8, 0)


def test_a_request_that_ends_meanwhile_leaves_its_blocks_kept(pool: BlockPool) -> None:
    fenced, taken = FencedBlocks(pool), pool.get_new_blocks(2)
    fenced.late({"r": 1, "s": 1})
    assert fenced.keep("r", [taken[0].block_id])
    assert fenced.keep("s", [taken[1].block_id])
    pool.free_blocks(taken)
    fenced.stopped({"s": 1})
    assert (pool.get_num_free_blocks(), len(fenced)) == (7, 1)
