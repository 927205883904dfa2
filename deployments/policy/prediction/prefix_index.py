"""Which replicas cache which blocks: chained block hash -> replicas, from the replicas' reports. Pure.

It is made for millions of blocks over thousands of replicas in one Python process:

- A replica is a small number, its slot. A block that one replica holds maps to that number, one object for all its
  blocks. A block that several hold maps to their sorted numbers, packed in two bytes each. A block takes about 100
  bytes, or 150 with several holders.
- The blocks are spread over many small tables, so that no growth, eviction or cleaning takes long.
- A replica that is lost, or that reports its whole cache anew, gives up its slot at once, and the slot is no hit any
  more. Its entries are cleaned away a few tables at a time, at each sweep and loss; then the slot is used again.
- A replica with KV tiers has a second slot, for the blocks that only its tiers have.
- A full table forgets the block that was stored, or was part of a placed prompt, the longest time ago.
- Blocks that placed prompts are about to bring are kept apart, by prompt: `expected_blocks`.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from deployments.messages import CacheChange
from deployments.policy.prediction.expected_blocks import ExpectedBlocks

_MAX_TABLES = 1024
"""The most tables."""

_MIN_TABLE_BLOCKS = 1024
"""The least blocks of a table, where there is more than one."""

_TABLES_A_SWEEP = 2
"""The tables that one sweep cleans."""

_MAX_SLOTS = 1 << 16
"""The most slots: a packed slot has two bytes."""

_EXPECTED_SHARE = 4
"""At most `max_blocks` divided by this may be expected."""

_Holders = int | bytes


class PrefixIndex:
    """The index is a hint: it may be out of date, and the engine's own answer is the truth.

    `max_blocks`: the most blocks that it remembers. `expectation_s`: how long after its prompt was computed an expected
    block that was not reported counts as cached.
    """

    def __init__(self, max_blocks: int = 4_000_000, expectation_s: float = 10.0) -> None:
        count = 1
        while count < _MAX_TABLES and max_blocks >= 2 * count * _MIN_TABLE_BLOCKS:
            count *= 2
        self._tables: list[dict[int, _Holders]] = [{} for _ in range(count)]
        self._mask = count - 1
        self._table_blocks = max(1, max_blocks // count)
        self._expected = ExpectedBlocks(expectation_s, max(1, max_blocks // _EXPECTED_SHARE))
        self._slots: dict[str, int] = {}
        self._tiers: dict[str, int] = {}  # the second slots, of replicas that have one
        self._of_tier: dict[int, str] = {}
        self._sequences: dict[str, int] = {}
        self._names: list[str] = []  # of each slot
        self._numbers: list[int] = []  # each slot as the one object that all tables share
        self._free: list[int] = []
        self._given_up: set[int] = set()
        self._cleaning: set[int] = set()  # slots given up before the current round through the tables began
        self._next_table = 0

    def __len__(self) -> int:
        """The blocks that at least one replica caches. Those of lost replicas count until they are cleaned away."""
        return sum(map(len, self._tables))

    @property
    def expected(self) -> int:
        """The number of expectations, each of a block by a replica, that are neither confirmed nor over."""
        return len(self._expected)

    def knows(self, replica_id: str) -> bool:
        """Whether it has every change of that replica since a whole one."""
        return replica_id in self._sequences

    def apply(self, replica_id: str, change: CacheChange, now_s: float) -> bool:
        """Enter a change of a replica. False: a change is missing, and nothing is entered before the next whole one.

        A change that was entered before is ignored. A whole change replaces all that was known of the replica, also
        what was expected of it.
        """
        self._expected.expire(now_s)
        if change.whole:
            self._give_up(replica_id)
        elif (last := self._sequences.get(replica_id)) is None:
            return False
        elif change.sequence <= last:
            return True
        elif change.sequence != last + 1:
            del self._sequences[replica_id]
            return False
        self._sequences[replica_id] = change.sequence
        slot = self._slot(replica_id)
        self._expected.told(slot, change.removed)
        self._expected.told(slot, change.stored)
        for block in change.removed:
            self._remove(block, slot)
        for block in change.stored:
            self._add(block, slot)
        self._tiered(replica_id, change)
        return True

    def _tiered(self, replica_id: str, change: CacheChange) -> None:
        if change.left and replica_id not in self._tiers:
            self._tiers[replica_id] = self._new_slot(replica_id)
            self._of_tier[self._tiers[replica_id]] = replica_id
        if (slot := self._tiers.get(replica_id)) is not None:
            for block in change.returned:
                self._remove(block, slot)
            for block in change.left:
                self._add(block, slot)

    def expect(self, replica_ids: Iterable[str], hashes: Sequence[int], now_s: float, known: int = 0) -> int:
        """These replicas are about to cache these blocks, in the order of the prompt.

        `known`: the number of leading blocks that all of them have already. Of a system prompt, a thousand replicas
        may. Returns the number of this expectation, for `computed`.
        """
        self._expected.expire(now_s)
        number = self._expected.add([self._slot(replica_id) for replica_id in replica_ids], hashes[known:])
        tables, mask = self._tables, self._mask
        cached = list(takewhile(lambda block: block in tables[block & mask], hashes))
        for block in reversed(cached):  # now they are the newest; the end of a prompt is forgotten first
            table = tables[block & mask]
            table[block] = table.pop(block)
        return number

    def computed(self, number: int, now_s: float) -> None:
        """The prompt of an expectation is computed, or given up: what is not reported soon is not there. Idempotent."""
        self._expected.computed(number, now_s)

    def forget(self, replica_id: str) -> None:
        """A replica is lost, and its cache with it. Unknown replicas are ignored."""
        self._sequences.pop(replica_id, None)
        self._give_up(replica_id)

    def hits(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """The number of leading blocks of a prompt that each replica caches, for those that cache at least the
        first."""
        return self.find(hashes)[0]

    def find(self, hashes: Sequence[int]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """The `hits`, and how many of its leading blocks the memory of a replica's engine has where tiers have more."""
        found: dict[str, int] = {}
        resident: dict[str, int] = {}
        tables, mask, names, expected_on = self._tables, self._mask, self._names, self._expected.of
        holding: set[int] = set()
        before: tuple[_Holders | None, Mapping[int, int] | None] = None, None
        depth = 0
        for block in hashes:
            now = tables[block & mask].get(block), expected_on(block)
            if now != before or not depth:  # along a prompt these are mostly equal
                holders, expected = now
                slots = set(_unpack(holders) if holders is not None else ())
                slots.update(expected or ())
                for tier in self._of_tier.keys() & slots if self._of_tier else ():
                    slots.discard(tier)
                    replica_id = self._of_tier[tier]
                    if not expected or self._slots[replica_id] not in expected:
                        resident.setdefault(replica_id, depth)
                if not depth:
                    slots -= self._given_up
                    holding = slots
                elif gone := holding - slots:
                    ended = dict.fromkeys(map(names.__getitem__, gone), depth)
                    found = found | ended if found else ended
                    holding -= gone
                if not holding:
                    break
                before = now
            depth += 1
        found.update(dict.fromkeys(map(names.__getitem__, holding), depth))
        return found, {each: at for each, at in resident.items() if at < found.get(each, 0)} if resident else resident

    def sweep(self, now_s: float) -> None:
        """Drop expectations that were not confirmed, and clean up after lost replicas, a bounded part at a time."""
        self._expected.expire(now_s)
        self._clean(_TABLES_A_SWEEP)

    # ---- slots

    def _slot(self, replica_id: str) -> int:
        if replica_id not in self._slots:
            self._slots[replica_id] = self._new_slot(replica_id)
        return self._slots[replica_id]

    def _new_slot(self, replica_id: str) -> int:
        if not self._free and len(self._names) == _MAX_SLOTS:
            self._clean(2 * len(self._tables))
        if self._free:
            slot = self._free.pop()
            self._names[slot] = replica_id
        else:
            slot = len(self._names)
            self._names.append(replica_id)
            self._numbers.append(slot)
        return self._numbers[slot]

    def _give_up(self, replica_id: str) -> None:
        gone = {slots.pop(replica_id) for slots in (self._slots, self._tiers) if replica_id in slots}
        if gone:
            self._of_tier = {slot: each for slot, each in self._of_tier.items() if slot not in gone}
            self._given_up |= gone
            self._clean(1)

    def _clean(self, tables: int) -> None:
        """Remove the slots that were given up from the next tables. A slot removed from all tables is free."""
        for _ in range(tables if self._given_up else 0):
            if self._next_table == 0:
                self._cleaning = set(self._given_up)
            self._clean_table(self._tables[self._next_table])
            self._next_table = (self._next_table + 1) & self._mask
            if self._next_table == 0:
                clean = {slot for slot in self._cleaning if not self._expected.concerns(slot)}
                self._given_up -= clean
                self._free += sorted(clean, reverse=True)

    def _clean_table(self, table: dict[int, _Holders]) -> None:
        gone = self._given_up
        held = [
            block
            for block, holders in table.items()
            if (holders in gone if isinstance(holders, int) else not gone.isdisjoint(array("H", holders)))
        ]
        for block in held:
            slots = _unpack(table[block])
            left = self._pack([slot for slot in slots if slot not in gone])
            if left is None:
                del table[block]
            else:
                table[block] = left

    # ---- tables

    def _add(self, block: int, slot: int) -> None:
        table = self._tables[block & self._mask]
        holders = table.get(block)
        if holders is None:
            self._make_room(table)
            table[block] = slot
        elif holders != slot:
            slots = _unpack(holders)
            if slot not in slots:
                insort(slots, slot)
                table[block] = slots.tobytes()

    def _remove(self, block: int, slot: int) -> None:
        table = self._tables[block & self._mask]
        holders = table.get(block)
        if holders is None:
            return
        slots = _unpack(holders)
        if slot in slots:
            slots.remove(slot)
            left = self._pack(slots)
            if left is None:
                del table[block]
            else:
                table[block] = left

    def _pack(self, slots: Sequence[int]) -> _Holders | None:
        if len(slots) > 1:
            return array("H", slots).tobytes()
        return self._numbers[slots[0]] if slots else None

    def _make_room(self, table: dict[int, _Holders]) -> None:
        """Forget a full table's oldest block."""
        if len(table) >= self._table_blocks:
            del table[next(iter(table))]


def _unpack(holders: _Holders) -> array[int]:
    return array("H", (holders,)) if isinstance(holders, int) else array("H", holders)
