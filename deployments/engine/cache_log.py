"""What a replica's prefix cache holds, and which changes the session manager has not been told yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from deployments.messages import CacheChange


class CacheLog:
    """The chained hashes of the blocks that are cached now. An engine without a prefix cache keeps an empty one.

    The first change is a whole one: a receiver knows by it that it has missed nothing.
    """

    def __init__(self) -> None:
        self._cached: set[int] = set()
        self._gained: set[int] = set()
        self._lost: set[int] = set()
        self._sequence = 0
        self._is_told = False

    def __len__(self) -> int:
        return len(self._cached)

    def stored(self, hashes: Iterable[int]) -> None:
        """Blocks were cached; those that were cached already do not count again."""
        new = set(hashes) - self._cached
        self._cached |= new
        self._gained |= new - self._lost
        self._lost -= new

    def removed(self, hashes: Iterable[int]) -> None:
        """Blocks were evicted; unknown ones are ignored."""
        gone = self._cached.intersection(hashes)
        self._cached -= gone
        self._lost |= gone - self._gained
        self._gained -= gone

    def clear(self) -> None:
        """Nothing is cached, or what is cached is not known any more."""
        self._cached.clear()
        self._is_told = False

    def change(self, whole: bool = False) -> CacheChange | None:
        """What changed since the last call, or with `whole` all there is. None: nothing changed.

        Each change is given once. A caller that could not deliver one asks for the whole.
        """
        whole = whole or not self._is_told
        if not (whole or self._gained or self._lost):
            return None
        self._sequence += 1
        stored, removed = (self._cached, ()) if whole else (self._gained, self._lost)
        change = CacheChange(self._sequence, tuple(stored), tuple(removed), whole)
        self._gained, self._lost, self._is_told = set(), set(), True
        return change
