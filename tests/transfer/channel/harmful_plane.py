"""A data plane that copies wrongly and says that all is well."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.plane import WriteState


@dataclass(frozen=True, slots=True)
class Place:
    """Where one block of one write has come: the address of each region's part, and the bytes of a part."""

    addresses: tuple[int, ...]
    length: int


Harm = Callable[[list[Place], int, random.Random], None]
"""What is done to the block of this number, of those of a write."""


def flip(places: list[Place], which: int, draw: random.Random) -> None:
    """One bit is another."""
    place = places[which]
    byte = ctypes.c_uint8.from_address(draw.choice(place.addresses) + draw.randrange(place.length))
    byte.value ^= 1 << draw.randrange(8)


def lose(places: list[Place], which: int, draw: random.Random) -> None:
    """The end of a part was not written."""
    place = places[which]
    begin = draw.randrange(place.length)
    ctypes.memset(draw.choice(place.addresses) + begin, 0, place.length - begin)


def misplace(places: list[Place], which: int, draw: random.Random) -> None:
    """It holds what belongs to a block behind it, or what did where there is none."""
    place, other = places[which], places[draw.randrange(which + 1, len(places))] if which + 1 < len(places) else None
    for region, address in enumerate(place.addresses):
        if other is None:
            ctypes.memset(address, 0, place.length)
        else:
            ctypes.memmove(address, other.addresses[region], place.length)


@dataclass(frozen=True, slots=True)
class Blow:
    """`harm` to the block that is number `which` of a write, at the write after `after` others."""

    after: int
    which: int
    harm: Harm


class HarmfulPlane(InProcessPlane):
    """`next`: what is to happen. `struck`: the block here that was harmed over there, if it did."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name)
        self._draw = random.Random(seed)
        self.next: Blow | None = None
        self.struck: int | None = None

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> WriteState:
        state = super().write(agent, layer, local, remote)
        if (blow := self.next) is None:
            return state
        if blow.after:
            self.next = replace(blow, after=blow.after - 1)
            return state
        ours, theirs = self._layout, self._peers[agent]
        assert ours is not None
        skip, length = theirs.window(ours)
        regions = range(theirs.regions_per_layer)
        places = [Place(tuple(theirs.address(layer, each, r) + skip for r in regions), length) for each in remote]
        which = min(blow.which, len(places) - 1)
        blow.harm(places, which, self._draw)
        self.next, self.struck = None, local[which]
        return state
