"""Which block is in which slot of a tier, and which block makes room for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transfer.store.admission import FrequencySketch
from transfer.store.eviction import EvictionOrder
from transfer.store.refs import BlockRef


@dataclass(frozen=True, slots=True)
class Held:
    """A block in a slot. `digest`: of its bytes."""

    ref: BlockRef
    slot: int
    digest: bytes


class Slots:
    """The table of a tier with `count` slots of one block each. It moves no bytes."""

    def __init__(self, count: int, sketch: FrequencySketch, crossover_blocks: float) -> None:
        self.count = count
        self._sketch, self._order = sketch, EvictionOrder(crossover_blocks)
        self._held: dict[bytes, Held] = {}
        self._free = list(range(count - 1, -1, -1))

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        """All blocks: earlier positions first, and of equal ones what is worth most first."""
        return (self._held[key] for key in self._order.best_first())

    @property
    def free(self) -> int:
        return len(self._free)

    def get(self, key: bytes) -> Held | None:
        return self._held.get(key)

    def use(self, key: bytes) -> None:
        """A block that may be here was used; the sketch has counted it."""
        if key in self._held:
            self._order.use(key, self._sketch.estimate(key))

    def claim(self, ref: BlockRef) -> tuple[int | None, Held | None]:
        """A slot for a block that is not here, and the block that was evicted for it.

        The slot is None where the tier is full and `ref` was not used more often than the victim. The victim's bytes
        are still in the slot. The claimed slot is the caller's, until `fill` or `release`. A block's parent is not its
        victim.
        """
        if self._free:
            return self._free.pop(), None
        key = self._order.victim(keep=ref.parent)
        if key is None or self._sketch.estimate(ref.key) <= self._sketch.estimate(key):
            return None, None
        self._order.evict(key)
        victim = self._held.pop(key)
        return victim.slot, victim

    def fill(self, held: Held) -> None:
        """A claimed slot has its block now."""
        self._held[held.ref.key] = held
        self._order.add(held.ref, self._sketch.estimate(held.ref.key))

    def restore(self, found: Sequence[Held]) -> None:
        """These blocks are in their slots, and no others: for a table that is new."""
        taken = {held.slot for held in found}
        self._free = [slot for slot in range(self.count - 1, -1, -1) if slot not in taken]
        for held in found:
            self.fill(held)

    def release(self, slot: int) -> None:
        """A claimed slot is free again."""
        self._free.append(slot)

    def drop(self, key: bytes) -> Held | None:
        """Forget a block; its slot is free. None: it is not here."""
        if (held := self._held.pop(key, None)) is not None:
            self._order.remove(key)
            self._free.append(held.slot)
        return held
