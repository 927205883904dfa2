"""Blocks go to buffers and back, by address and as tensors, and the two agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.transfer.store.conftest import BLOCK_BYTES, BLOCKS, LAYERS, REGIONS, Cache, keys_of
from transfer.memory.layout import KVLayout
from transfer.store.block_memory import BlockMemory, HostMemory, TensorMemory
from transfer.store.host_buffer import HostBuffer
from transfer.store.refs import StoreError


def tensors_of(cache: Cache) -> TensorMemory:
    """The same memory as the cache's, as tensors."""
    regions = [torch.from_numpy(cache.array[layer, region]) for layer in range(LAYERS) for region in range(REGIONS)]
    return TensorMemory(regions)


def copied(memory: BlockMemory, blocks: list[int]) -> list[bytes]:
    buffer = HostBuffer(memory, len(blocks))
    views = [buffer.view(slot) for slot in range(len(blocks))]
    memory.gather(blocks, views)
    found = [bytes(view) for view in views]
    for view in views:
        view.release()
    buffer.close()
    return found


def test_both_see_the_same_bytes(cache: Cache) -> None:
    cache.array[:] = np.random.default_rng(1).integers(0, 256, cache.array.shape, dtype=np.uint8)
    tensors = tensors_of(cache)
    assert tensors.block_bytes == cache.memory.block_bytes == BLOCK_BYTES
    expected = [cache.array[:, :, block].tobytes() for block in (63, 0, 7)]
    assert copied(cache.memory, [63, 0, 7]) == copied(tensors, [63, 0, 7]) == expected


@pytest.mark.parametrize("as_tensors", [False, True])
def test_what_is_scattered_is_in_its_blocks_and_nowhere_else(cache: Cache, as_tensors: bool) -> None:
    memory: BlockMemory = tensors_of(cache) if as_tensors else cache.memory
    keys = keys_of("a", 3)
    for block, key in enumerate(keys):
        cache.write(block, key)
    sources = [memoryview(bytearray(data)) for data in copied(memory, [0, 1, 2])]
    cache.wipe()
    memory.scatter([9, 63, 8], sources)
    assert [cache.has(block, key) for block, key in zip((9, 63, 8), keys, strict=True)] == [True] * 3
    assert {block for block in range(BLOCKS) if cache.array[:, :, block].any()} == {8, 9, 63}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_of_any_dtype_and_of_unlike_regions(dtype: torch.dtype) -> None:
    regions = [torch.arange(10 * size).reshape(10, size).to(dtype) for size in (8, 24)]
    memory = TensorMemory(regions)
    before = [region[3].clone() for region in regions]
    (data,) = copied(memory, [3])
    for region in regions:
        region.zero_()
    memory.scatter([5], [memoryview(bytearray(data))])
    assert all(torch.equal(region[5], kept) for region, kept in zip(regions, before, strict=True))


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_outside_the_memory_is_refused(cache: Cache, block: int) -> None:
    for memory in (cache.memory, tensors_of(cache)):
        with pytest.raises(StoreError):
            memory.scatter([block], [memoryview(bytearray(BLOCK_BYTES))])
    assert not cache.array.any()


def test_memory_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(StoreError, match="contiguous"):
        TensorMemory([torch.zeros(8, 4).t()])
    with pytest.raises(StoreError, match="cuda"):
        HostMemory(KVLayout(1, 1, 1, 8, 8, (0,), device="cuda"))


class Refuses(HostMemory):
    def pin(self, buffer: memoryview) -> None:
        raise StoreError("no pinned memory")


def test_memory_that_cannot_be_pinned_is_given_back(cache: Cache) -> None:
    with pytest.raises(StoreError, match="no pinned memory"):
        HostBuffer(Refuses(cache.layout), 4)
