"""What the tiers of all workers of an engine have, for its scheduler in another process.

Each worker has its part of every block in tiers of its own. A block can be loaded where all workers have it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import takewhile

from transfer.store.block_memory import Lender
from transfer.store.ledger import Changes, Tier


class SharedTiers:
    """In the scheduler's process. `workers`: how many tell what they have, on any thread."""

    def __init__(self, workers: int) -> None:
        self._all, self._lock = (1 << workers) - 1, threading.Lock()
        self._ranks: dict[tuple[Tier, bytes], int] = {}  # which workers have a block in a tier, as bits
        self._changes: Changes = {}
        self._kept: list[list[bytes]] = []

    def changed(self, rank: int, changes: Changes) -> None:
        """Blocks of a worker have come into a tier (True) or gone (False)."""
        with self._lock:
            for place, is_here in changes.items():
                self._note(place, rank, is_here)

    def lost(self, rank: int) -> None:
        """A worker says nothing any more."""
        with self._lock:
            for place in list(self._ranks):
                self._note(place, rank, False)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the blocks, from the first on, every worker has in a tier now; a hint."""
        with self._lock:
            return sum(1 for _ in takewhile(lambda key: self._bits(key) == self._all, keys))

    def keep(self, keys: Sequence[bytes], lender: Lender) -> None:
        """The workers are to store the blocks of a prompt. Each borrows them by itself, and not from `lender`."""
        del lender
        self._kept.append(list(keys))

    def take_kept(self) -> list[list[bytes]]:
        """What the workers are to be told: the prompts whose blocks they store."""
        taken, self._kept = self._kept, []
        return taken

    @property
    def has_kept(self) -> bool:
        """Whether `take_kept` has something."""
        return bool(self._kept)

    def take_changes(self) -> Changes:
        """Which blocks all workers have in a tier since the last call (True), or not all of them any more (False)."""
        with self._lock:
            taken, self._changes = self._changes, {}
        return taken

    def _bits(self, key: bytes) -> int:
        bits = 0
        for tier in Tier:
            bits |= self._ranks.get((tier, key), 0)
        return bits

    def _note(self, place: tuple[Tier, bytes], rank: int, is_here: bool) -> None:
        before = self._ranks.get(place, 0)
        after = before | 1 << rank if is_here else before & ~(1 << rank)
        if after:
            self._ranks[place] = after
        else:
            self._ranks.pop(place, None)
        if (before == self._all) is not (after == self._all):
            self._changes[place] = after == self._all
