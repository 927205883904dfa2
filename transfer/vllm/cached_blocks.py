"""What other replicas and this replica's tiers may read of this engine's prefix cache.

Their threads borrow blocks while the engine's thread schedules, so that none of them waits for a step. A lock keeps
the two apart, around each call of vLLM's that takes blocks or gives them back. A borrowed block has one more reference,
as one that a request uses: vLLM neither evicts nor overwrites it.

vLLM names a block when it schedules the step that computes it. Such a block is lent once that step is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class CachedBlocks:
    """A `transfer.channel.library.Library`, and a `transfer.store.block_memory.Lender`.

    `recall`: ends all fetches; False when writes still read blocks. `wait_s`: the longest wait for what tiers read.
    """

    def __init__(self, manager: KVCacheManager, recall: Callable[[], bool], wait_s: float) -> None:
        self._pool, self._lock, self.recall = manager.block_pool, threading.Condition(threading.RLock()), recall
        self._wait_s = wait_s
        self._borrowed, self._recalled, self._recalling = 0, False, False
        self._named: set[int] = set()
        self._steps: deque[set[int]] = deque()
        pool = self._pool
        pool.get_new_blocks = self._alone(pool.get_new_blocks)
        pool.touch = self._alone(pool.touch)
        pool.free_blocks = self._alone(pool.free_blocks)
        pool.reset_prefix_cache = self._alone(pool.reset_prefix_cache)
        pool.cache_full_blocks = self._noting(pool.cache_full_blocks)
        manager.allocate_slots = self._allocating(manager.allocate_slots)

    def begin_step(self) -> None:
        """A step was scheduled, perhaps with nothing in it."""
        self._steps.append(self._named)
        self._named = set()

    def end_step(self) -> None:
        """The oldest open step is over: its blocks are computed."""
        if self._steps:
            self._steps.popleft()

    def borrow(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """See `Library`. `hashes`: vLLM's block hashes, which are equal in all engines of equal fingerprint."""
        with self._lock:
            found = self.hold(() if self._recalling else hashes)
            self._borrowed += len(found)
        return found

    def hold(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """As `borrow`, for ever: no request that finds too few blocks gets them. Until `release`."""
        with self._lock:
            found: list[KVCacheBlock] = []
            for name in hashes:
                blocks = self._pool.get_cached_block(name, [0])
                if not blocks or self._is_open(blocks[0].block_id):
                    break
                found.append(blocks[0])
            self._pool.touch(found)
        return tuple(block.block_id for block in found)

    def release(self, blocks: Sequence[int]) -> None:
        """These blocks are held no more. They stay cached until others need them; the end of a prefix goes first."""
        with self._lock:
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])

    def give_back(self, blocks: Sequence[int]) -> None:
        """See `Library`. The end of a prefix is evicted first, as vLLM does it."""
        with self._lock:
            self.release(blocks)
            self._borrowed -= len(blocks)
            if not self._borrowed:
                self._recalled = False
                self._lock.notify_all()

    def _is_open(self, block: int) -> bool:
        return block in self._named or any(block in step for step in self._steps)

    def _alone(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return call(*args, **kwargs)

        return alone

    def _noting(self, cache_full_blocks: Callable[..., Any]) -> Callable[..., Any]:
        """Note the blocks that get a name."""

        def noting(
            request: Any,
            blocks: list[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            *more: Any,
            **named: Any,
        ) -> Any:
            with self._lock:
                self._named.update(block.block_id for block in blocks[num_cached_blocks:num_full_blocks])
                return cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *more, **named)

        return noting

    def _allocating(self, allocate_slots: Callable[..., Any]) -> Callable[..., Any]:
        """A request that finds too few blocks gets those that are borrowed: a fetch may fail, and a request may not.

        A peer may hold up the end of a fetch. So one step waits for it, and later ones do not, until all is given back.
        """

        def allocating(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                slots = allocate_slots(*args, **kwargs)
                if slots is not None or not self._borrowed or self._recalled:
                    return slots
                self._recalled = self._recalling = True
            try:
                is_over = self.recall()
                with self._lock:
                    if is_over and self._lock.wait_for(lambda: not self._borrowed, self._wait_s):
                        slots = allocate_slots(*args, **kwargs)
            finally:
                self._recalling = False
            return slots

        return allocating


def take_ascending(pool: BlockPool) -> None:
    """Give a request its new blocks in ascending order, so that runs of them coalesce into one descriptor.

    The pool hands out blocks that were freed last to first, descending. The pool still chooses which blocks.
    """
    take = pool.get_new_blocks
    pool.get_new_blocks = lambda count: sorted(take(count), key=lambda block: block.block_id)
