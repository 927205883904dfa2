"""Which block goes when a tier is full: of the last blocks of their chains, the one that is cheapest to lose.

GreedyDual-Size-Frequency (Cherkasova, 1998) with the cost of computing a block again. All blocks of a tier have the
same bytes, so cost per byte orders as cost does. A block is of use only behind the blocks before it. So a block whose
children are here stays until they are gone, and a chain gets shorter from its end.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from transfer.store.refs import NO_PARENT, BlockRef

CROSSOVER_BLOCKS = 256.0


def recompute_cost(position: int, crossover_blocks: float = CROSSOVER_BLOCKS) -> float:
    """The cost of computing the block at `position` again, in costs of a first block.

    Attention reads every block before. `crossover_blocks`: the position at which this costs as much as the rest.
    """
    return 1.0 + position / crossover_blocks


@dataclass(slots=True)
class _Held:
    ref: BlockRef
    priority: float


class EvictionOrder:
    """The blocks of one tier. Pure: it moves no bytes."""

    def __init__(self, crossover_blocks: float = CROSSOVER_BLOCKS) -> None:
        self._crossover = crossover_blocks
        self._held: dict[bytes, _Held] = {}
        self._children: Counter[bytes] = Counter()  # also of blocks that are not here
        self._leaves: list[tuple[float, int, bytes]] = []  # a heap; it has entries that are no longer true
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, ref: BlockRef, uses: int) -> None:
        """A block comes that is not here. `uses`: how often it was used lately."""
        self._held[ref.key] = _Held(ref, self._priority(ref, uses))
        if ref.parent != NO_PARENT:
            self._children[ref.parent] += 1
        self._push(ref.key)

    def use(self, key: bytes, uses: int) -> None:
        """A block that is here is used."""
        held = self._held[key]
        held.priority = self._priority(held.ref, uses)
        self._push(key)

    def remove(self, key: bytes) -> None:
        """A block that is here goes."""
        ref = self._held.pop(key).ref
        if ref.parent != NO_PARENT:
            self._children[ref.parent] -= 1
            if not self._children[ref.parent]:
                del self._children[ref.parent]
                self._push(ref.parent)

    def evict(self, key: bytes) -> None:
        """A victim goes. All that is used from now on is worth more than what was worth as little as the victim."""
        self._clock = max(self._clock, self._held[key].priority)
        self.remove(key)

    def victim(self, keep: bytes = NO_PARENT) -> bytes | None:
        """The block to evict next; of equal ones the later in its prompt. None: there is none but `keep`."""
        kept = None
        while self._leaves and (self._is_stale(self._leaves[0]) or self._leaves[0][2] == keep):
            entry = heapq.heappop(self._leaves)
            kept = kept if self._is_stale(entry) else entry
        found = self._leaves[0][2] if self._leaves else None
        if kept is not None:
            heapq.heappush(self._leaves, kept)
        return found

    def best_first(self) -> list[bytes]:
        """All keys: what is worth most first, and a block before its children."""
        held = sorted(self._held.values(), key=lambda one: (one.ref.position, -one.priority))
        return [one.ref.key for one in held]

    def _priority(self, ref: BlockRef, uses: int) -> float:
        return self._clock + max(uses, 1) * recompute_cost(ref.position, self._crossover)

    def _push(self, key: bytes) -> None:
        if (held := self._held.get(key)) is None or key in self._children:
            return
        heapq.heappush(self._leaves, (held.priority, -held.ref.position, key))
        if len(self._leaves) > 64 + 2 * len(self._held):
            self._leaves = [
                (one.priority, -one.ref.position, key) for key, one in self._held.items() if key not in self._children
            ]
            heapq.heapify(self._leaves)

    def _is_stale(self, entry: tuple[float, int, bytes]) -> bool:
        held = self._held.get(entry[2])
        return held is None or held.priority != entry[0] or entry[2] in self._children
