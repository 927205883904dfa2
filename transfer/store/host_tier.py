"""The host tier: blocks in main memory, in one preallocated buffer."""

from __future__ import annotations

from collections.abc import Iterator

from transfer.memory.digest import digest_of
from transfer.store.block_memory import BlockMemory
from transfer.store.host_buffer import HostBuffer
from transfer.store.ledger import Ledger, Tier
from transfer.store.refs import BlockRef
from transfer.store.slots import Held, Slots


class HostTier:
    """The slots of `slots` in a buffer of their own. A tier without slots has no block."""

    def __init__(self, memory: BlockMemory, slots: Slots, ledger: Ledger) -> None:
        self._slots, self._ledger = slots, ledger
        self.buffer = HostBuffer(memory, slots.count)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[Held]:
        return iter(self._slots)

    def use(self, key: bytes) -> None:
        """Count a use of a block that may be here."""
        self._slots.use(key)

    def claim(self, ref: BlockRef) -> tuple[int | None, Held | None]:
        """See `Slots.claim`."""
        slot, victim = self._slots.claim(ref)
        if victim is not None:
            self._ledger.count("host_evicted")
            self._ledger.removed(Tier.HOST, victim.ref.key)
        return slot, victim

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self.buffer.view(slot)

    def fill(self, ref: BlockRef, slot: int, digest: bytes) -> None:
        """A claimed slot has its block now."""
        self._slots.fill(Held(ref, slot, digest))
        self._ledger.count("host_stored")
        self._ledger.added(Tier.HOST, ref.key)

    def release(self, slot: int) -> None:
        """A claimed slot is free again."""
        self._slots.release(slot)

    def read(self, key: bytes) -> memoryview | None:
        """The bytes of a block, if it is here and whole. A block that is not whole is forgotten."""
        if (held := self._slots.get(key)) is None:
            return None
        view = self.view(held.slot)
        if digest_of(view) == held.digest:
            return view
        self._ledger.count("digest_failures")
        self.drop(key)
        return None

    def drop(self, key: bytes) -> None:
        """Forget a block that may be here."""
        if self._slots.drop(key) is not None:
            self._ledger.removed(Tier.HOST, key)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self.buffer.close()
