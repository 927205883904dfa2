"""The last block of an aborted request can be found like those before it, which are full.

A session that moves comes back to the replica that gave it up, with what was answered, to be handed over. Its run
there was aborted: its full blocks are in vLLM's prefix cache, and the KV of the block behind them is in memory. But
vLLM finds full blocks only, and would compute up to a block of tokens again. This file finds such blocks by their
tokens. vLLM does what follows: it copies a block that is found in part before the request writes to it.

A kept block is free. It has a name, as cached blocks have, so that vLLM takes it late. When vLLM takes it or resets its
cache, the block loses its name, and is not found any more.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from transfer.memory.blocks import blocks_for

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

MOST_KEPT = 256
"""Blocks that are kept at most; the oldest are forgotten first. All are looked through for every request."""
BLOCKS_EACH = 2
"""Blocks kept of one request. Two, because tokens that the client does not have yet may lie in a further block."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A block while it has this name: its tokens, and what else its KV depends on."""

    name: bytes
    before: Any
    tokens: list[int]


class PartialBlocks:
    """The scheduler's side. Once it is made, vLLM's lookup in its prefix cache finds what is kept here, too."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager, self._pool = manager, manager.block_pool
        self._group = manager.coordinator.single_type_managers[0]
        self._kept: dict[int, _Kept] = {}
        self._find_full = manager.get_computed_blocks
        # Draft layers want the last tokens computed again; with attention windows not all blocks are there.
        self._is_on = type(self._group) is FullAttentionManager and not self._group.use_eagle
        if self._is_on:
            manager.get_computed_blocks = self.find

    def keep(self, request: Request) -> None:
        """Keep the last blocks of a request, before vLLM frees them. Its KV is here: it has sampled a token."""
        size = self._group.block_size
        computed = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        if not self._is_on or computed <= 0:
            return
        end = blocks_for(computed, size)
        blocks = self._manager.get_blocks(request.request_id).blocks[0]
        for index in range(max(0, end - BLOCKS_EACH), end):
            block: KVCacheBlock = blocks[index]
            if block.block_hash is None:
                block.set_block_hash(uuid.uuid4().bytes)
            tokens = request.all_token_ids[index * size : min((index + 1) * size, computed)]
            self._kept.pop(block.block_id, None)
            self._kept[block.block_id] = _Kept(block.block_hash, self._before(request, index), tokens)
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def find(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """What vLLM's prefix cache has of a request, and the next block if that one holds all but the last token."""
        found: tuple[KVCacheBlocks, int, int] = self._find_full(request)
        (blocks, tokens, boundary), last = found, request.num_tokens - 1
        if not self._kept or not 0 < last - tokens < self._group.block_size or not self._may_copy(request):
            return found
        before = self._before(request, tokens // self._group.block_size)
        block = self._holding(request.all_token_ids[tokens:last], before)
        if block is None:
            return found
        return self._manager.create_kv_cache_blocks(([*blocks.blocks[0], block],)), last, boundary

    def _may_copy(self, request: Request) -> bool:
        """The block and its copy are both held until the copy is made. No request may have to give way for that."""
        spare = self._pool.get_num_free_blocks() - blocks_for(request.num_tokens, self._group.block_size)
        enough: bool = spare > self._manager.watermark_blocks + len(self._group.req_to_blocks)
        return enough and bool(self._manager.prefix_cache_lookup_enabled(request))

    def _holding(self, tokens: list[int], before: Any) -> KVCacheBlock | None:
        for block_id, kept in self._kept.items():
            block: KVCacheBlock = self._pool.blocks[block_id]
            if block.block_hash == kept.name and kept.before == before and kept.tokens[: len(tokens)] == tokens:
                return block
        return None

    def _before(self, request: Request, index: int) -> Any:
        """The name of the block before, which stands for all tokens before, and what vLLM adds to a block's tokens."""
        size = self._group.block_size
        extra, _ = generate_block_hash_extra_keys(request, index * size, (index + 1) * size, 0)
        return (request.block_hashes[index - 1] if index else None), extra
