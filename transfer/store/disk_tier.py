"""The disk tier: blocks in one segment, which outlives the process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transfer.memory.digest import digest_of
from transfer.store.block_file import BlockFile, SystemFile, open_block_file
from transfer.store.block_memory import BlockMemory
from transfer.store.config import DiskConfig
from transfer.store.host_buffer import HostBuffer
from transfer.store.ledger import Ledger, Tier
from transfer.store.refs import BlockRef, StoreError
from transfer.store.segment import Segment, open_segment
from transfer.store.slots import Held, Slots

logger = logging.getLogger("baton.store")

STAGED_BLOCKS = 8  # read from the disk at once
ERRORS_IN_A_ROW = 32  # after so many the disk is left alone

Item = tuple[BlockRef, bytes, memoryview]  # a block, its digest, its bytes


class DiskTier:
    """The slots of `slots` in a segment. `host`: the buffer of the host tier, from which blocks come down.

    Raises StoreError where it cannot be opened. Errors of the disk after that are counted and end no call: a block
    that cannot be read is a miss, and one that cannot be written is not there. After `ERRORS_IN_A_ROW` the tier is
    empty until the process starts again.
    """

    def __init__(
        self,
        config: DiskConfig,
        fingerprint: str,
        memory: BlockMemory,
        slots: Slots,
        ledger: Ledger,
        host: HostBuffer,
    ) -> None:
        self._memory, self._slots, self._ledger = memory, slots, ledger
        self._errors = 0
        self._abandoned: list[HostBuffer] = []
        self.staging = HostBuffer(memory, STAGED_BLOCKS)
        segment: Segment | None = None
        try:
            segment = open_segment(config.path, fingerprint, memory.block_bytes)
            slots.restore(segment.take(slots.count))
            for held in slots:
                ledger.added(Tier.DISK, held.ref.key)
            self._file: BlockFile = open_block_file(segment.fileno, (host, self.staging), config.use_nixl)
        except (OSError, StoreError) as error:
            if segment is not None:
                segment.close()
            self.staging.close()
            raise StoreError(f"no disk tier in {config.path}: {error}") from error
        self._segment = segment

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[Held]:
        return iter(self._slots)

    def get(self, key: bytes) -> Held | None:
        return self._slots.get(key)

    def use(self, key: bytes) -> None:
        """Count a use of a block that may be here."""
        self._slots.use(key)

    def put(self, items: Sequence[Item]) -> None:
        """Write the blocks that are admitted and not here yet."""
        held, views = self._claim(items)
        if not held:
            return
        if not self._transfer(self._file.write, held, views):
            for one in held:
                self._slots.release(one.slot)
            return
        for one in held:
            if not self._call(self._segment.write, one):
                self._slots.release(one.slot)
            elif self._is_alive:
                self._slots.fill(one)
                self._ledger.count("disk_stored")
                self._ledger.added(Tier.DISK, one.ref.key)

    def read(self, keys: Sequence[bytes]) -> dict[bytes, memoryview]:
        """Those of at most `STAGED_BLOCKS` blocks that are here and whole, in the staging buffer."""
        held = [one for key in dict.fromkeys(keys) if (one := self._slots.get(key)) is not None]
        views = [self.staging.view(place) for place in range(len(held))]
        if held and not self._transfer(self._file.read, held, views):
            return self._read_singly(held)
        return {one.ref.key: view for one, view in zip(held, views, strict=True) if self._is_whole(one, view)}

    def drop(self, key: bytes) -> None:
        """Forget a block that may be here. Its bytes stay on the disk until its slot is used again."""
        if (held := self._slots.drop(key)) is not None:
            self._ledger.removed(Tier.DISK, key)
            self._call(self._segment.clear, held.slot)

    def close(self) -> None:
        """Release files, lock and memory; idempotent."""
        self._file.close()
        self._segment.close()
        for buffer in (self.staging, *self._abandoned):
            buffer.close()

    @property
    def _is_alive(self) -> bool:
        return self._errors < ERRORS_IN_A_ROW

    def _claim(self, items: Sequence[Item]) -> tuple[list[Held], list[memoryview]]:
        held, views, seen = list[Held](), list[memoryview](), set[bytes]()
        for ref, digest, view in items:
            if not self._is_alive or ref.key in self._slots or ref.key in seen:
                continue
            slot, victim = self._slots.claim(ref)
            if victim is not None:
                self._ledger.count("disk_evicted")
                self._ledger.removed(Tier.DISK, victim.ref.key)
                self._call(self._segment.clear, victim.slot)
            if slot is not None:
                seen.add(ref.key)
                held.append(Held(ref, slot, digest))
                views.append(view)
        return held, views

    def _read_singly(self, held: Sequence[Held]) -> dict[bytes, memoryview]:
        """One bad block fails a read of several, so each is read by itself."""
        found = {}
        for place, one in enumerate(held):
            view = self.staging.view(place)
            if not self._transfer(self._file.read, [one], [view]):
                self.drop(one.ref.key)
            elif self._is_whole(one, view):
                found[one.ref.key] = view
        return found

    def _is_whole(self, held: Held, view: memoryview) -> bool:
        """Whether the bytes are those that were stored. A block that is not whole is forgotten."""
        if digest_of(view) == held.digest:
            return True
        self._ledger.count("digest_failures")
        self.drop(held.ref.key)
        return False

    def _transfer(
        self,
        call: Callable[[Sequence[int], Sequence[memoryview]], None],
        held: Sequence[Held],
        views: Sequence[memoryview],
    ) -> bool:
        done = self._call(call, [self._segment.offset(one.slot) for one in held], views)
        if not done and not isinstance(self._file, SystemFile):
            self._leave_nixl()
        return done

    def _leave_nixl(self) -> None:
        """Go on with the system's calls and another staging buffer: what NIXL failed at may still write to the old."""
        logger.warning("the disk tier goes on without NIXL")
        self._file.close()
        self._file = SystemFile(self._segment.fileno)
        self._abandoned.append(self.staging)
        self.staging = HostBuffer(self._memory, STAGED_BLOCKS)

    def _call(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Whether a call of the disk succeeded. It is not made once the disk is left alone."""
        if not self._is_alive:
            return False
        try:
            call(*arguments)
        except OSError as error:
            logger.warning("the disk tier: %s", str(error))  # the error itself would keep its frames' buffers
            self._ledger.count("disk_errors")
            self._errors += 1
            if not self._is_alive:
                self._give_up()
            return False
        self._errors = 0
        return True

    def _give_up(self) -> None:
        logger.error("the disk tier is left alone after %d errors in a row", self._errors)
        for held in list(self._slots):
            self._slots.drop(held.ref.key)
            self._ledger.removed(Tier.DISK, held.ref.key)
