"""The cheapest fleet that meets the objectives, with as few simulations as possible. Pure: it asks, and is told.

It takes for granted that a replica more never hurts. Then a fleet that misses rules out all that have no more of any
pool, and one that meets rules out all that cost as much or more. The kinds are searched one after the other, the one
that promises to be the cheapest first:

1. Along a line of fleets with the guessed ratio of the pools, from the guess upwards, until one meets the objectives.
   Where none on it does, the largest fleets with other ratios.
2. Between that and the largest of the same ratio that does not: halving.
3. Every fleet that costs less and is not ruled out, the dearest first: these rule out most. Where one meets the
   objectives, 2. again with its ratio.

As DistServe's placement search (OSDI '24), it simulates instead of solving, and halves. Unlike that, the pools are not
sized one by one: here, any replica may do any work, so one pool's size depends on the other's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from load_tests.plan.demand import Room
from load_tests.plan.fleets import Counts, Fleet, Kind

GROWTH = 1.4
"""Without any fleet that meets the objectives, the next one is so much larger."""


def within(small: Counts, large: Counts) -> bool:
    """Whether one has no more of any pool than the other."""
    return all(a <= b for a, b in zip(small, large, strict=True))


class Search:
    """`most`: replicas of the largest fleet. `best`: the cheapest fleet so far that meets the objectives."""

    def __init__(self, rooms: Sequence[Room], most: int) -> None:
        self._rooms = sorted(rooms, key=lambda room: room.kind.cost(room.guess))
        self._most = most
        self._good: dict[Kind, list[Counts]] = {room.kind: [] for room in rooms}
        self._bad: dict[Kind, list[Counts]] = {room.kind: [] for room in rooms}

    @property
    def best(self) -> Fleet | None:
        found = [best for kind in self._good if (best := self.best_of(kind)) is not None]
        return min(found, key=lambda fleet: fleet.cost, default=None)

    def best_of(self, kind: Kind) -> Fleet | None:
        """The cheapest fleet of one kind that is known to meet the objectives."""
        counts = min(self._good[kind], key=kind.cost, default=None)
        return None if counts is None else Fleet(kind, counts)

    def tell(self, fleet: Fleet, meets: bool) -> None:
        """What came of a fleet. The last word counts: one that met the objectives may miss them with another seed."""
        good, bad = self._good[fleet.kind], self._bad[fleet.kind]
        if meets:
            good.append(fleet.counts)
        else:
            bad.append(fleet.counts)
            self._good[fleet.kind] = [counts for counts in good if not within(counts, fleet.counts)]

    def ask(self, running: Sequence[Fleet] = ()) -> Fleet | None:
        """The next fleet to simulate; None when there is none, though the results of what runs may change that.

        `running`: fleets that are being simulated. They are taken to miss.
        """
        best = self.best
        for room in self._rooms:
            bad = self._bad[room.kind] + [fleet.counts for fleet in running if fleet.kind == room.kind]
            if (counts := self._next(room, bad, None if best is None else best.cost)) is not None:
                return Fleet(room.kind, counts)
        return None

    def _next(self, room: Room, bad: Sequence[Counts], below: float | None) -> Counts | None:
        kind, good = room.kind, self._good[room.kind]

        def is_open(counts: Counts) -> bool:
            in_reach = below is None or kind.cost(counts) < below - 1e-9
            return in_reach and sum(counts) >= room.least and not any(within(counts, each) for each in bad)

        base = min(good, key=kind.cost, default=room.guess)
        line = [counts for counts in _line(base, room.least, self._most) if is_open(counts)]
        if below is None and line:
            return self._grown(room, line, bad)
        if good and line:
            return line[len(line) // 2]
        share = base[0] / sum(base)
        return max(
            (counts for counts in _all(len(base), self._most) if is_open(counts)),
            key=lambda counts: (round(kind.cost(counts), 9), -abs(counts[0] / sum(counts) - share)),
            default=None,
        )

    def _grown(self, room: Room, line: Sequence[Counts], bad: Sequence[Counts]) -> Counts:
        """The first fleet on the line that is large enough to be worth a try; the largest where none is."""
        tried = max((sum(counts) for counts in bad), default=0)
        wanted = max(sum(room.guess), GROWTH * tried)
        return next((counts for counts in line if sum(counts) >= wanted), line[-1])


def _line(base: Counts, least: int, most: int) -> Iterator[Counts]:
    """Fleets of `least` to `most` replicas with the ratio of `base`, the small ones first."""
    last = None
    for total in range(least, most + 1):
        head = tuple(max(1, round(number * total / sum(base))) for number in base[:-1])
        counts = (*head, max(1, total - sum(head)))
        if counts != last and sum(counts) <= most:
            yield counts
        last = counts


def _all(pools: int, most: int) -> Iterator[Counts]:
    """Every fleet of at most `most` replicas."""
    for counts in itertools.product(range(1, most + 1), repeat=pools):
        if sum(counts) <= most:
            yield counts
