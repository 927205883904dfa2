"""How vLLM's prefix cache behaves, as far as we rely on it: what it takes, forgets, and publishes.

No engine is started. The manager, the pool and the publisher are vLLM's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from vllm.distributed import kv_events
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from deployments.engine.kv_events import KVEvents
from transfer.memory.blocks import chained_hashes

SIZE, BLOCKS, WAIT_S = 16, 32, 60.0
USABLE = BLOCKS - 1
"""One block of the pool is the null block."""
PROMPT = list(range(100, 100 + 3 * SIZE))


class Cache:
    """A prefix cache of one group, and one request that has filled three of its blocks."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        group = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], group)])
        self.manager = KVCacheManager(config, 512, SIZE, SIZE, enable_kv_cache_events=True)
        self.pool = self.manager.block_pool
        hasher = get_request_block_hasher(SIZE, sha256)
        self.request = Request("r", PROMPT, SamplingParams(max_tokens=9), None, block_hasher=hasher)
        assert self.manager.allocate_slots(self.request, len(PROMPT)) is not None
        self.ids: set[int] = set(self.manager.get_block_ids("r")[0])

    def named(self) -> set[int]:
        """The blocks that can be found by their hash."""
        return {block.block_id for block in self.pool.blocks if block.block_hash is not None}


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_a_named_block_is_taken_after_all_others_and_loses_its_name_then(cache: Cache) -> None:
    assert cache.named() == cache.ids
    cache.manager.free(cache.request)
    others = {block.block_id for block in cache.pool.get_new_blocks(USABLE - len(cache.ids))}
    assert not others & cache.ids
    assert cache.named() == cache.ids
    assert {block.block_id for block in cache.pool.get_new_blocks(len(cache.ids))} == cache.ids
    assert cache.named() == set()


def test_a_reset_takes_all_names(cache: Cache) -> None:
    cache.manager.free(cache.request)
    assert cache.manager.reset_prefix_cache()
    assert cache.named() == set()


def test_every_block_that_is_cached_or_evicted_is_told_of(cache: Cache) -> None:
    (stored,) = cache.manager.take_events()
    assert isinstance(stored, kv_events.BlockStored)
    assert (stored.token_ids, stored.parent_block_hash, stored.block_size) == (PROMPT, None, SIZE)
    assert len(stored.block_hashes) == len(cache.ids)
    cache.manager.free(cache.request)
    cache.pool.get_new_blocks(USABLE)
    removed = cache.manager.take_events()
    assert all(isinstance(event, kv_events.BlockRemoved) for event in removed)
    assert {name for event in removed for name in event.block_hashes} == set(stored.block_hashes)


def test_a_reset_is_told_of(cache: Cache) -> None:
    cache.manager.free(cache.request)
    cache.manager.take_events()
    cache.manager.reset_prefix_cache()
    assert [type(event) for event in cache.manager.take_events()] == [kv_events.AllBlocksCleared]


@pytest.fixture
def events() -> Iterator[KVEvents]:
    made = KVEvents(SIZE)
    yield made
    made.close()


def test_the_publisher_connects_to_us_and_counts_from_zero(cache: Cache, events: KVEvents) -> None:
    """A number that did not begin at zero, or grew by more than one, would count as a gap and clear the log."""
    publisher = kv_events.ZmqEventPublisher(0, endpoint=events.endpoint, topic=events.topic)
    try:
        deadline, published = time.monotonic() + WAIT_S, 0
        wanted = set(chained_hashes(PROMPT, SIZE))
        (stored,) = cache.manager.take_events()
        known: set[int] = set()
        while known != wanted:  # what is published before the subscription has arrived is lost, as in an engine's start
            publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[kv_events.AllBlocksCleared(), stored]))
            published += 1
            assert time.monotonic() < deadline
            time.sleep(0.05)
            events.drain()
            change = events.log.change(whole=True)
            known = set(change.stored) if change else set()
        before = events._expected
        publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[]))
        while events._expected == before:
            assert time.monotonic() < deadline
            events.drain()
            time.sleep(0.01)
        assert events._expected == published + 1
    finally:
        publisher.shutdown()
