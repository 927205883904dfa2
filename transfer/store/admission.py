"""How often keys were used lately, in bounded memory. A full tier admits a block that was used more than its victim.

A count-min sketch with a doorkeeper and aging, after TinyLFU (Einziger, Friedman and Manes, 2017).
"""

from __future__ import annotations

import hashlib

ROWS = 4
MAX_COUNT = 255  # of a counter
_HALVES = bytes(count // 2 for count in range(256))


class FrequencySketch:
    """Counts uses of keys. `capacity`: the number of blocks in all tiers; the sketch takes 64 to 128 bytes for each.

    The first use of a key opens the doorkeeper (a Bloom filter), and further uses are counted: the many keys that come
    once fill no counter. After 8 uses for each block of the capacity, all counts are halved and the doorkeeper is shut.
    """

    def __init__(self, capacity: int) -> None:
        self._width = 1 << (8 * max(capacity, 8) - 1).bit_length()
        self._period, self._uses = self._width, 0
        self._doors = [bytearray(self._width) for _ in range(ROWS)]
        self._rows = [bytearray(self._width) for _ in range(ROWS)]

    def use(self, key: bytes) -> None:
        """Count one use."""
        if self._uses >= self._period:
            self._age()
        self._uses += 1
        places = self._places(key)
        if not all(door[place] for door, place in zip(self._doors, places, strict=True)):
            for door, place in zip(self._doors, places, strict=True):
                door[place] = 1
            return
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        for row, place in zip(self._rows, places, strict=True):
            if row[place] == least < MAX_COUNT:  # the larger ones count other keys, too
                row[place] += 1

    def estimate(self, key: bytes) -> int:
        """The uses of a key since the last aging and half of those before; never too few up to 256, seldom too many."""
        places = self._places(key)
        opened = all(door[place] for door, place in zip(self._doors, places, strict=True))
        return opened + min(row[place] for row, place in zip(self._rows, places, strict=True))

    def _age(self) -> None:
        self._uses = 0
        self._doors = [bytearray(self._width) for _ in range(ROWS)]
        self._rows = [row.translate(_HALVES) for row in self._rows]

    def _places(self, key: bytes) -> list[int]:
        """One place in each row."""
        digest = hashlib.blake2b(key, digest_size=8 * ROWS).digest()
        return [int.from_bytes(digest[8 * row : 8 * row + 8], "little") % self._width for row in range(ROWS)]
