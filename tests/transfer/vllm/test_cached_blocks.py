"""What other replicas may borrow of a prefix cache, with vLLM's own KV cache manager. No engine is started."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from transfer.vllm.cached_blocks import CachedBlocks

SIZE, BLOCKS = 16, 16
WAIT_S = 30.0


class Cache:
    """A KV cache of 15 blocks that requests can use."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        group = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], group)])
        self.manager = KVCacheManager(config, 512, SIZE, SIZE)
        self.pool = self.manager.block_pool
        self.cached = CachedBlocks(self.manager, lambda: False, WAIT_S)

    def request(self, name: str, tokens: list[int], **fields: Any) -> Request:
        return Request(name, tokens, SamplingParams(max_tokens=100), None, block_hasher=self._hasher, **fields)

    def schedule(self, request: Request) -> bool:
        """Give a request its blocks, as vLLM does in the step that computes its prompt."""
        blocks, found, _ = self.manager.get_computed_blocks(request)
        return self.manager.allocate_slots(request, request.num_tokens - found, found, blocks) is not None

    def run(self, name: str, tokens: list[int]) -> list[int]:
        """Schedule a request, end its step, and free it. Its blocks."""
        request = self.request(name, tokens)
        assert self.schedule(request)
        self.step()
        ids: list[int] = self.manager.get_block_ids(name)[0]
        self.manager.free(request)
        return ids

    def step(self) -> None:
        self.cached.begin_step()
        self.cached.end_step()

    def names(self, tokens: list[int], **fields: Any) -> list[bytes]:
        """As a replica that has the same prompt would ask."""
        return [bytes(name) for name in self.request("asks", tokens, **fields).block_hashes]

    @property
    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())


def tokens(count: int, seed: int = 0) -> list[int]:
    return list(range(1000 * seed, 1000 * seed + count))


def test_full_blocks_of_an_ended_request_are_lent_and_given_back() -> None:
    cache = Cache()
    ids, free = cache.run("a", tokens(3 * SIZE + 5)), cache.free
    lent = cache.cached.borrow(cache.names(tokens(5 * SIZE)))
    assert list(lent) == ids[:3], "the block that is not full has no name"
    assert cache.free == free - 3
    cache.cached.give_back(lent)
    assert cache.free == free
    assert cache.cached.borrow(cache.names(tokens(SIZE))) == lent[:1], "it is cached still"


def test_it_ends_before_the_first_block_that_is_missing() -> None:
    cache = Cache()
    cache.run("a", tokens(2 * SIZE))
    names = cache.names(tokens(2 * SIZE))
    assert cache.cached.borrow([b"?" * 32, *names]) == ()
    assert len(cache.cached.borrow([names[0], b"?" * 32, names[1]])) == 1


def test_another_salt_has_other_blocks() -> None:
    cache = Cache()
    cache.run("a", tokens(2 * SIZE))
    assert cache.cached.borrow(cache.names(tokens(2 * SIZE), cache_salt="another")) == ()


def test_a_block_is_lent_once_the_step_that_computes_it_is_over() -> None:
    """vLLM names it before. With asynchronous scheduling the next step begins before this one is over."""
    cache = Cache()
    names = cache.names(tokens(2 * SIZE))
    assert cache.schedule(cache.request("a", tokens(2 * SIZE)))
    assert cache.pool.get_cached_block(names[0], [0]), "it has its name"
    assert cache.cached.borrow(names) == ()
    cache.cached.begin_step()
    assert cache.cached.borrow(names) == ()
    cache.cached.begin_step()
    assert cache.cached.borrow(names) == ()
    cache.cached.end_step()
    assert len(cache.cached.borrow(names)) == 2


def test_borrowed_blocks_are_neither_evicted_nor_overwritten() -> None:
    cache = Cache()
    cache.run("a", tokens(4 * SIZE))
    lent = cache.cached.borrow(cache.names(tokens(4 * SIZE)))
    others = cache.run("b", tokens((BLOCKS - 1 - 4) * SIZE, seed=1))
    assert not set(lent) & set(others)
    assert not cache.schedule(cache.request("c", tokens(BLOCKS * SIZE, seed=2))), "nothing gives the blocks back"


def test_a_request_that_needs_the_blocks_gets_them() -> None:
    cache = Cache()
    cache.run("a", tokens(4 * SIZE))
    lent, recalls = cache.cached.borrow(cache.names(tokens(4 * SIZE))), []

    def recall() -> bool:
        recalls.append(lent)
        cache.cached.give_back(lent)
        return True

    cache.cached.recall = recall
    assert cache.schedule(cache.request("b", tokens((BLOCKS - 1) * SIZE, seed=1)))
    assert recalls == [lent]
    assert not cache.schedule(cache.request("c", tokens(SIZE, seed=2)))
    assert len(recalls) == 1, "nothing is borrowed any more"


def test_a_recall_that_comes_to_nothing_is_not_waited_for_again() -> None:
    cache = Cache()
    cache.run("a", tokens(4 * SIZE))
    lent, recalls = cache.cached.borrow(cache.names(tokens(4 * SIZE))), []

    def recall() -> bool:
        recalls.append(lent)
        return False

    cache.cached.recall = recall
    asks = cache.request("b", tokens((BLOCKS - 1) * SIZE, seed=1))
    assert [cache.schedule(asks) for _ in range(3)] == [False] * 3
    assert len(recalls) == 1
    cache.cached.give_back(lent)
    assert cache.schedule(asks)


def test_borrowing_beside_a_busy_engine_loses_no_block() -> None:
    """A thread borrows and gives back while requests come and go."""
    cache = Cache()
    stop, errors = threading.Event(), []
    names = [cache.names(tokens(6 * SIZE, seed)) for seed in range(4)]

    def borrow() -> None:
        try:
            while not stop.is_set():
                for each in names:
                    cache.cached.give_back(cache.cached.borrow(each))
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=borrow)
    thread.start()
    draw = random.Random(1)
    try:
        for number in range(3000):
            request = cache.request(str(number), tokens(draw.randrange(1, 6 * SIZE), draw.randrange(4)))
            if cache.schedule(request):
                cache.step()
                cache.manager.free(request)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert cache.free == BLOCKS - 1
    assert all(block.ref_cnt == 0 for block in cache.pool.blocks if not block.is_null)


def test_a_request_that_needs_blocks_waits_until_the_tiers_have_copied_them() -> None:
    """They are given back by another thread, and no fetch is open."""
    cache = Cache()
    cache.run("a", tokens(4 * SIZE))
    lent = cache.cached.borrow(cache.names(tokens(4 * SIZE)))
    recalled = threading.Event()

    def recall() -> bool:
        recalled.set()
        return True

    def copy() -> None:
        assert recalled.wait(WAIT_S)
        cache.cached.give_back(lent)

    cache.cached.recall = recall
    copies = threading.Thread(target=copy)
    copies.start()
    assert cache.schedule(cache.request("b", tokens((BLOCKS - 1) * SIZE, seed=1)))
    copies.join(WAIT_S)


def test_nothing_is_lent_while_a_request_waits_for_blocks() -> None:
    """A tier that stores a long prompt would borrow the next blocks as soon as it has given back the last ones."""
    cache = Cache()
    cache.run("a", tokens(4 * SIZE))
    names = cache.names(tokens(4 * SIZE))
    lent, again = cache.cached.borrow(names), []

    def recall() -> bool:
        cache.cached.give_back(lent)
        again.append(cache.cached.borrow(names))
        return True

    cache.cached.recall = recall
    assert cache.schedule(cache.request("b", tokens((BLOCKS - 1) * SIZE, seed=1)))
    assert again == [()]


def test_a_fetch_that_hangs_is_waited_for_once_while_tiers_come_and_go() -> None:
    cache, recalls = Cache(), []
    cache.run("a", tokens(4 * SIZE))
    names = cache.names(tokens(4 * SIZE))
    hangs = cache.cached.borrow(names[:2])

    def recall() -> bool:
        recalls.append(hangs)
        return False

    cache.cached.recall = recall
    asks = cache.request("b", tokens((BLOCKS - 1) * SIZE, seed=1))
    for _ in range(3):
        assert not cache.schedule(asks)
        cache.cached.give_back(cache.cached.borrow(names[2:]))
    assert len(recalls) == 1
    cache.cached.give_back(hangs)
    assert cache.schedule(asks)
