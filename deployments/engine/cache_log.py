"""What a replica's prefix cache holds, and which changes the session manager has not been told yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from deployments.messages import CacheChange


class CacheLog:
    """The chained hashes of the blocks that are cached now. An engine without a prefix cache keeps an empty one.

    The first change is a whole one: a receiver knows by it that it has missed nothing.
    """

    def __init__(self) -> None:
        self._cached, self._tiered = _Blocks(), _Blocks()
        self._sequence = 0
        self._is_told = False

    def __len__(self) -> int:
        return len(self._cached.now)

    def stored(self, hashes: Iterable[int]) -> None:
        """Blocks came into the engine's memory; those that were there already do not count again."""
        new = set(hashes)
        self._cached.add(new)
        self._tiered.discard(new)

    def left(self, hashes: Iterable[int]) -> None:
        """Blocks were evicted from the engine's memory, and a tier has them; unknown ones are ignored."""
        self._tiered.add(self._cached.now.intersection(hashes))

    def removed(self, hashes: Iterable[int]) -> None:
        """Blocks are cached nowhere any more; unknown ones are ignored."""
        gone = set(hashes)
        self._cached.discard(gone)
        self._tiered.discard(gone)

    def clear(self) -> None:
        """Nothing is cached, or what is cached is not known any more."""
        self._cached, self._tiered = _Blocks(), _Blocks()
        self._is_told = False

    def change(self, whole: bool = False) -> CacheChange | None:
        """What changed since the last call, or with `whole` all there is. None: nothing changed.

        Each change is given once. A caller that could not deliver one asks for the whole.
        """
        whole = whole or not self._is_told
        if not (whole or self._cached.has_news or self._tiered.has_news):
            return None
        self._sequence += 1
        self._is_told = True
        stored, removed = self._cached.tell(whole)
        left, returned = self._tiered.tell(whole)
        return CacheChange(self._sequence, stored, removed, whole, left, returned)


class _Blocks:
    """A set of blocks, and what has come and gone since it was told. What did both is not told."""

    def __init__(self) -> None:
        self.now: set[int] = set()
        self.came: set[int] = set()
        self.went: set[int] = set()

    def add(self, blocks: set[int]) -> None:
        new = blocks - self.now
        self.now |= new
        self.came |= new - self.went
        self.went -= new

    def discard(self, blocks: set[int]) -> None:
        gone = self.now & blocks
        self.now -= gone
        self.went |= gone - self.came
        self.came -= gone

    @property
    def has_news(self) -> bool:
        return bool(self.came or self.went)

    def tell(self, whole: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What has come and gone since the last call, or with `whole` all there is."""
        told = (tuple(self.now), ()) if whole else (tuple(self.came), tuple(self.went))
        self.came, self.went = set(), set()
        return told
