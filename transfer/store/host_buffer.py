"""Main memory in slots of one block: what the host tier keeps, and where blocks stop on their way to the disk."""

from __future__ import annotations

import contextlib
import mmap

from transfer.store.block_memory import BlockMemory, address_of


class HostBuffer:
    """`slots` slots of one block of `memory` each, in one anonymous mapping, pinned where the device asks for it.

    Its pages are taken from the system at their first use. Raises OSError where the system has no such memory, and
    StoreError where it cannot be pinned.
    """

    def __init__(self, memory: BlockMemory, slots: int) -> None:
        self._memory, self._bytes, self._is_closed = memory, memory.block_bytes, False
        self._map = mmap.mmap(-1, max(slots * self._bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._map)
        self.address, self.nbytes = address_of(self._view), self._view.nbytes
        try:
            memory.pin(self._view)
        except BaseException:
            self._free()
            raise

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self._view[slot * self._bytes : (slot + 1) * self._bytes]

    def close(self) -> None:
        """Give the memory back; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._memory.unpin(self._view)
            self._free()

    def _free(self) -> None:
        self._view.release()
        with contextlib.suppress(BufferError):  # it goes with the last view of a slot
            self._map.close()
