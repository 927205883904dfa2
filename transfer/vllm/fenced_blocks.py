"""Blocks that the source of a fetch may still write, although their request no longer waits for it.

A source may stand still, and its process live: nothing tells whether it writes once more. The request then computes its
prompt in other blocks. Its old ones belong to it no longer, and to no other request until the source has stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class FencedBlocks:
    """Each worker of this replica has its own part of a fetch, so workers are counted."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._writing: Counter[str] = Counter()
        self._kept: dict[str, list[KVCacheBlock]] = {}

    def __len__(self) -> int:
        """The fetches whose blocks are kept."""
        return len(self._kept)

    def late(self, workers: Mapping[str, int]) -> None:
        """So many workers no longer wait for their part of a fetch, by request, and it may still be written."""
        self._writing.update(workers)

    def keep(self, request_id: str, blocks: Sequence[int]) -> bool:
        """No worker waits any more. Keep the blocks, if they may still be written; returns whether that is so.

        Call it while the request has them.
        """
        if self._writing[request_id] <= 0:
            del self._writing[request_id]
            return False
        self._kept[request_id] = [self._pool.blocks[block] for block in blocks]
        self._pool.touch(self._kept[request_id])
        return True

    def stopped(self, workers: Mapping[str, int]) -> None:
        """Nothing is written any more for so many of the workers that were late, by request."""
        self._writing.subtract(workers)
        for request_id in workers:
            if self._writing[request_id] <= 0 and request_id in self._kept:
                self._pool.free_blocks(self._kept.pop(request_id))
                del self._writing[request_id]
