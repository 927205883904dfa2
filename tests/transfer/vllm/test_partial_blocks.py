"""The blocks that aborted requests end in, with vLLM's own KV cache manager. No engine is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from transfer.vllm import partial_blocks
from transfer.vllm.partial_blocks import PartialBlocks

SIZE = 16


class Cache:
    """A KV cache of 31 blocks, and requests as vLLM's scheduler runs them."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        group = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(32, [], [KVCacheGroupSpec(["layer"], group)])
        self.manager = KVCacheManager(config, 512, SIZE, SIZE, enable_kv_cache_events=True)
        self.pool = self.manager.block_pool
        self.partial = PartialBlocks(self.manager)
        self.found = 0

    def request(self, name: str, tokens: list[int], **fields: Any) -> Request:
        params = SamplingParams(max_tokens=100)
        return Request(name, tokens, params, None, block_hasher=self._hasher, **fields)

    def run(self, name: str, tokens: list[int], **fields: Any) -> Request:
        """Schedule a request: all but what the cache has is computed, and so is in `found`."""
        request = self.request(name, tokens, **fields)
        blocks, self.found, _ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - self.found
        assert self.manager.allocate_slots(request, new, self.found, blocks) is not None
        request.num_computed_tokens = request.num_tokens
        return request

    def aborted(self, name: str, tokens: list[int], **fields: Any) -> list[int]:
        """Run a request, sample a token, abort it. Its blocks."""
        request = self.run(name, tokens, **fields)
        request.append_output_token_ids(7)
        self.partial.keep(request)
        ids: list[int] = self.manager.get_block_ids(name)[0]
        self.manager.free(request)
        return ids


def tokens(count: int, seed: int = 0) -> list[int]:
    return list(range(1000 * seed, 1000 * seed + count))


@pytest.mark.parametrize("length", [5, SIZE - 1, SIZE + 1, 3 * SIZE + 9, 4 * SIZE - 1])
def test_all_but_the_last_token_is_found_and_the_block_is_copied(length: int) -> None:
    cache = Cache()
    ids = cache.aborted("first", tokens(length))
    assert cache.pool.get_usage() == 0, "a kept block is a free one"
    again = cache.run("again", tokens(length))
    assert cache.found == length - 1
    copies, held = cache.manager.take_kv_cache_block_copies()
    taken = cache.manager.get_block_ids("again")[0]
    if (length - 1) % SIZE:
        assert [tuple(copy) for copy in copies] == [(ids[(length - 1) // SIZE], taken[(length - 1) // SIZE])]
    cache.pool.free_blocks(held)
    cache.manager.free(again)
    assert cache.pool.get_usage() == 0


def test_tokens_that_came_later_are_no_hindrance() -> None:
    """The client had 40; the request was aborted with 50, a block further."""
    cache = Cache()
    cache.aborted("first", tokens(50))
    for known in (40, 46, 49, 50):
        request = cache.run(f"has {known}", tokens(known))
        assert cache.found == known - 1
        cache.pool.free_blocks(cache.manager.take_kv_cache_block_copies()[1])
        cache.manager.free(request)


def test_what_does_not_go_on_from_there_does_not_find_it() -> None:
    cache = Cache()
    cache.aborted("first", tokens(40))
    for other in ([*tokens(35), 9, 9, 9], tokens(40, seed=3), tokens(60)):
        blocks, found, _ = cache.manager.get_computed_blocks(cache.request("other", other))
        assert found % SIZE == 0
        assert len(blocks.blocks[0]) == found // SIZE


def test_a_salt_in_the_first_block_counts() -> None:
    cache = Cache()
    cache.aborted("first", tokens(10), cache_salt="mine")
    assert cache.manager.get_computed_blocks(cache.request("theirs", tokens(10)))[1] == 0
    assert cache.manager.get_computed_blocks(cache.request("mine", tokens(10), cache_salt="mine"))[1] == 9


def test_a_block_that_is_taken_or_whose_cache_is_reset_is_not_found() -> None:
    cache = Cache()
    cache.aborted("first", tokens(5))
    assert cache.manager.reset_prefix_cache()
    assert cache.manager.get_computed_blocks(cache.request("again", tokens(5)))[1] == 0
    kept = cache.aborted("second", tokens(5))
    taken = cache.pool.get_new_blocks(30)
    assert kept[0] not in {block.block_id for block in taken}, "it is taken last"
    taken += cache.pool.get_new_blocks(1)
    assert kept[0] == taken[-1].block_id
    cache.pool.free_blocks(taken)
    assert cache.manager.get_computed_blocks(cache.request("again", tokens(5)))[1] == 0
    assert not [each for each in cache.pool.take_events() if type(each).__name__ == "BlockRemoved"]


def test_where_blocks_are_short_nothing_is_copied() -> None:
    """A copy takes one block more than a request, for a step."""
    cache = Cache()
    cache.aborted("first", tokens(40))
    others = cache.pool.get_new_blocks(27)
    assert cache.pool.get_num_free_blocks() == 4
    assert cache.manager.get_computed_blocks(cache.request("again", tokens(40)))[1] == 39
    cache.run("another", tokens(3, seed=1))
    assert cache.manager.get_computed_blocks(cache.request("again", tokens(40)))[1] == 2 * SIZE
    cache.pool.free_blocks(others)


def test_tokens_in_flight_are_not_there_yet() -> None:
    cache = Cache()
    request = cache.run("first", tokens(20))
    request.num_in_flight_tokens = 4
    cache.partial.keep(request)
    cache.manager.free(request)
    assert cache.manager.get_computed_blocks(cache.request("too far", tokens(18)))[1] == SIZE
    assert cache.manager.get_computed_blocks(cache.request("here", tokens(16)))[1] == 15


def test_as_many_are_kept_as_are_worth_looking_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_blocks, "MOST_KEPT", 3)
    cache = Cache()
    for number in range(5):
        cache.aborted(f"number {number}", tokens(5, seed=number))
    found = [cache.manager.get_computed_blocks(cache.request("again", tokens(5, seed=each)))[1] for each in range(5)]
    assert found == [0, 0, 4, 4, 4]


def test_draft_layers_have_their_last_tokens_computed_again() -> None:
    manager = Cache().manager
    del manager.get_computed_blocks
    manager.coordinator.single_type_managers[0].use_eagle = True
    PartialBlocks(manager)
    assert "get_computed_blocks" not in vars(manager)
