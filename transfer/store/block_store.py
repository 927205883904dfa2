"""Store, load, delete and look up blocks by hash, in a host tier over a disk tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import takewhile

from transfer.memory.digest import digest_of
from transfer.store.admission import FrequencySketch
from transfer.store.block_memory import BlockMemory, Gate, Gather, Lender, gather_lent, gather_owned
from transfer.store.config import StoreConfig
from transfer.store.disk_tier import STAGED_BLOCKS, DiskTier
from transfer.store.host_tier import HostTier
from transfer.store.ledger import Changes, Ledger, Tier
from transfer.store.refs import BlockRef, StoreError
from transfer.store.segment import slot_bytes
from transfer.store.slots import Held, Slots

logger = logging.getLogger("baton.store")


class BlockStore:
    """The tiers of one worker. One thread uses it; only `lookup`, `leading` and `counters` may be called by others as
    well.

    A disk tier that cannot be opened is logged and counted, and the store goes without. Raises OSError or StoreError
    where there is no memory for the host tier.
    """

    def __init__(self, memory: BlockMemory, config: StoreConfig) -> None:
        self._memory, self._ledger = memory, Ledger()
        host_slots = config.host_bytes // memory.block_bytes
        disk_slots = config.disk.size_bytes // slot_bytes(memory.block_bytes) if config.disk else 0
        self._sketch = FrequencySketch(host_slots + disk_slots)
        self._host = HostTier(memory, Slots(host_slots, self._sketch, config.crossover_blocks), self._ledger)
        self._disk: DiskTier | None = None
        if config.disk is not None:
            slots = Slots(disk_slots, self._sketch, config.crossover_blocks)
            try:
                self._disk = DiskTier(config.disk, config.fingerprint, memory, slots, self._ledger, self._host.buffer)
            except StoreError as error:
                logger.error("%s", error)
                self._ledger.count("disk_errors")
            except BaseException:
                self._host.close()
                raise

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk tier."""
        return self._disk is not None

    def store(self, refs: Sequence[BlockRef], blocks: Sequence[int]) -> list[bool]:
        """Copy `blocks` of the memory into the tiers, as the consecutive blocks `refs` of one prompt.

        Returns for each whether a tier has it now. The first that is not admitted ends it: what comes after it would
        be of no use. This is one use of each block up to there. Raises ValueError for lists of unequal length.
        """
        owned = dict(zip([ref.key for ref in refs], blocks, strict=True))
        return self._store(refs, gather_owned(self._memory, owned))

    def store_lent(self, refs: Sequence[BlockRef], lender: Lender) -> list[bool]:
        """The same for blocks that `lender` has in the memory, or has no more. It lends them while they are copied."""
        return self._store(refs, gather_lent(self._memory, lender))

    def _store(self, refs: Sequence[BlockRef], gather: Gather) -> list[bool]:
        begun, done = time.monotonic(), list[bool]()
        for begin in range(0, len(refs), STAGED_BLOCKS):
            done += self._store_some(refs[begin : begin + STAGED_BLOCKS], gather)
            if not done[-1]:
                break
        done += [False] * (len(refs) - len(done))
        self._ledger.count("not_admitted", done.count(False))
        self._ledger.count("store_s", time.monotonic() - begun)
        return done

    def load(self, keys: Sequence[bytes], blocks: Sequence[int], gate: Gate | None = None) -> list[bool]:
        """Copy blocks by their keys into `blocks` of the memory. Returns for each whether it was.

        A block of the memory whose key was not loaded is as it was. This is one use of each key. Once `gate` is shut,
        no more are. Raises ValueError for lists of unequal length.
        """
        gate = gate or Gate()
        begun = time.monotonic()
        pairs = list(zip(keys, blocks, strict=True))
        self.touch(keys)
        done = self._load_from_host(pairs, gate)
        for begin in range(0, len(pairs), STAGED_BLOCKS):
            some = range(begin, min(begin + STAGED_BLOCKS, len(pairs)))
            self._load_from_disk(pairs, [index for index in some if not done[index]], done, gate)
        self._ledger.count("misses", done.count(False))
        self._ledger.count("loaded_bytes", done.count(True) * self._memory.block_bytes)
        self._ledger.count("load_s", time.monotonic() - begun)
        return done

    def promote(self, keys: Sequence[bytes]) -> None:
        """Copy blocks that only the disk tier has into the host tier, where they are admitted there."""
        keys = [key for key in dict.fromkeys(keys) if key not in self._host]
        for begin in range(0, len(keys) if self._disk else 0, STAGED_BLOCKS):
            assert self._disk is not None
            for key, view in self._disk.read(keys[begin : begin + STAGED_BLOCKS]).items():
                if (held := self._disk.get(key)) is None:
                    continue  # evicted by what went down for the one before
                slot, victim = self._host.claim(held.ref)
                self._bring_down([victim] if victim else [])
                if slot is not None:
                    self._host.view(slot)[:] = view
                    self._host.fill(held.ref, slot, held.digest)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count one use of each key, wherever its block is."""
        for key in keys:
            self._sketch.use(key)
            self._host.use(key)
            if self._disk:
                self._disk.use(key)

    def lookup(self, keys: Sequence[bytes]) -> list[Tier | None]:
        """The fastest tier that has each block. It is a hint: a block may go, or turn out broken when it is loaded."""
        disk: DiskTier | tuple[bytes, ...] = self._disk or ()
        return [Tier.HOST if key in self._host else Tier.DISK if key in disk else None for key in keys]

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks, from the first on, are in a tier. As much a hint as `lookup`."""
        disk: DiskTier | tuple[bytes, ...] = self._disk or ()
        return sum(1 for _ in takewhile(lambda key: key in self._host or key in disk, keys))

    def held(self) -> Changes:
        """All blocks that are in a tier."""
        places = [(Tier.HOST, held.ref.key) for held in self._host]
        places += [(Tier.DISK, held.ref.key) for held in self._disk or ()]
        return dict.fromkeys(places, True)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget blocks. Their bytes stay where they are until others take their slots."""
        for key in keys:
            self._host.drop(key)
            if self._disk:
                self._disk.drop(key)

    def drain(self, timeout_s: float) -> None:
        """Bring the host tier's blocks down to the disk, the first blocks of all prompts first, while there is time.

        They stay in the host tier, too.
        """
        deadline, held = time.monotonic() + timeout_s, list(self._host)
        for begin in range(0, len(held), STAGED_BLOCKS):
            if time.monotonic() >= deadline:
                return
            self._bring_down(held[begin : begin + STAGED_BLOCKS])

    def counters(self) -> dict[str, float]:
        """Totals since the start: the names of `ledger.COUNTERS`."""
        return dict(self._ledger.counts)

    def take_changes(self) -> Changes:
        """Which blocks have come into a tier (True) or gone (False) since the last call. What was found is new, too."""
        return self._ledger.take_changes()

    def close(self) -> None:
        """Give up memory, files and lock; idempotent. What is on the disk stays."""
        if self._disk:
            self._disk.close()
        self._host.close()

    def _store_some(self, refs: Sequence[BlockRef], gather: Gather) -> list[bool]:
        """At most `STAGED_BLOCKS` blocks: those that the host tier admits into it, the others to the disk."""
        claimed, victims, spilled = list[tuple[BlockRef, int]](), list[Held](), list[BlockRef]()
        self.touch([ref.key for ref in refs])
        for ref in {ref.key: ref for ref in refs}.values():
            if ref.key in self._host:
                continue
            slot, victim = self._host.claim(ref)
            victims += [victim] if victim else []
            if slot is not None:
                claimed.append((ref, slot))
            else:
                spilled.append(ref)
        self._bring_down(victims)
        self._fill_host(claimed, gather)
        self._spill(spilled, gather)
        return [found is not None for found in self.lookup([ref.key for ref in refs])]

    def _bring_down(self, held: Sequence[Held]) -> None:
        """Write blocks that are in slots of the host tier to the disk, where they are admitted there."""
        if self._disk and held:
            self._disk.put([(one.ref, one.digest, self._host.view(one.slot)) for one in held])

    def _fill_host(self, claimed: Sequence[tuple[BlockRef, int]], gather: Gather) -> None:
        filled = 0
        views = [self._host.view(slot) for _, slot in claimed]
        try:
            filled = self._gather([ref for ref, _ in claimed], views, gather)
        finally:
            for _, slot in claimed[filled:]:
                self._host.release(slot)
        for (ref, slot), view in zip(claimed[:filled], views, strict=False):
            self._host.fill(ref, slot, digest_of(view))

    def _spill(self, spilled: Sequence[BlockRef], gather: Gather) -> None:
        """Store blocks that the host tier did not admit on the disk."""
        new = [ref for ref in spilled if self._disk and ref.key not in self._disk]
        if not new or not self._disk:
            return
        views = [self._disk.staging.view(place) for place in range(len(new))]
        count = self._gather(new, views, gather)
        self._disk.put([(ref, digest_of(view), view) for ref, view in zip(new[:count], views, strict=False)])

    def _gather(self, refs: Sequence[BlockRef], views: Sequence[memoryview], gather: Gather) -> int:
        count = gather([ref.key for ref in refs], views) if refs else 0
        self._ledger.count("stored_bytes", count * self._memory.block_bytes)
        return count

    def _load_from_host(self, pairs: Sequence[tuple[bytes, int]], gate: Gate) -> list[bool]:
        views = [self._host.read(key) for key, _ in pairs]
        found = [(block, view) for (_, block), view in zip(pairs, views, strict=True) if view is not None]
        if not self._scatter([block for block, _ in found], [view for _, view in found], gate):
            return [False] * len(pairs)
        self._ledger.count("host_hits", len(found))
        return [view is not None for view in views]

    def _load_from_disk(
        self, pairs: Sequence[tuple[bytes, int]], wanted: Sequence[int], done: list[bool], gate: Gate
    ) -> None:
        """Load those pairs whose indices are `wanted`, and note them in `done`."""
        views = self._disk.read([pairs[index][0] for index in wanted]) if self._disk and wanted else {}
        found = [index for index in wanted if pairs[index][0] in views]
        if self._scatter([pairs[index][1] for index in found], [views[pairs[index][0]] for index in found], gate):
            self._ledger.count("disk_hits", len(found))
            for index in found:
                done[index] = True

    def _scatter(self, blocks: Sequence[int], views: Sequence[memoryview], gate: Gate) -> bool:
        with gate.passing() as is_open:
            if is_open and blocks:
                self._memory.scatter(blocks, views)
            return is_open
