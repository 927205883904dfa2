"""How much more load there will be when a start would be over: by trend, and by what came a season ago. Pure.

The season is a seasonal naive forecast: what followed the same moment of the last season follows again, in proportion
to the load of today. `docs/concepts/scaling.md` says why it is not a larger model.
"""

from __future__ import annotations

import math
from collections import deque

LOOK_S = 60.0
"""Two means over so long give the trend."""
SURE = 3.0
"""A trend counts where it is over so many standard deviations of counting."""
SHRUNK = 2.0
"""A trend of `d` standard deviations counts as one of `d - SHRUNK**2 / d`: Breiman's non-negative garrote. Chance makes
a trend that is barely sure look larger than it is; one that is far beyond chance keeps nearly all of its size."""
MOST_BY_TREND, MOST_BY_SEASON = 2.0, 4.0
"""The most that the load is expected to grow to within one start, as a multiple."""
BINS = 144
"""The most parts of a season: ten minutes of a day."""


class Forecast:
    """The rate of requests, and what it will be. `season_s`: after it, the load repeats; None: only the trend.

    `interval_s`: between two looks. A part of a season has two of them at least.
    """

    def __init__(self, season_s: float | None, interval_s: float) -> None:
        self._season_s = season_s
        self._bins = min(BINS, int((season_s or 0.0) / (2.0 * interval_s)))
        self._counts: deque[tuple[float, float]] = deque()  # times, and the requests until then
        self._sums, self._seen = [0.0] * self._bins, [0] * self._bins
        self._last: list[float] | None = None
        self._turn: int | None = None

    def look(self, at_s: float, requests: float, per_s: float) -> None:
        """Take the number of all requests until now, and the rate of now."""
        if self._counts and requests < self._counts[-1][1]:
            self._counts.clear()
        self._counts.append((at_s, requests))
        while len(self._counts) > 2 and self._counts[1][0] <= at_s - 2 * LOOK_S:
            self._counts.popleft()
        if self._season_s is not None:
            self._note(at_s, per_s, self._season_s)

    def growth(self, at_s: float, ahead_s: float, burst: float = 1.0) -> float:
        """The largest load within `ahead_s`, as a multiple of the load now; at least 1. `burst`: see `History`."""
        trend = min(self._trend(at_s, ahead_s, burst), MOST_BY_TREND)
        return max(1.0, trend, min(self._seasonal(at_s, ahead_s), MOST_BY_SEASON))

    def _trend(self, at_s: float, ahead_s: float, burst: float) -> float:
        middle = next((look for look in self._counts if look[0] >= at_s - LOOK_S), None)
        if middle is None or middle[0] - self._counts[0][0] < LOOK_S / 2 or at_s <= middle[0]:
            return 1.0
        (first_s, first), (middle_s, half), (_, last) = self._counts[0], middle, self._counts[-1]
        before, now = (half - first) / (middle_s - first_s), (last - half) / (at_s - middle_s)
        noise = math.sqrt(burst * (before / (middle_s - first_s) + now / (at_s - middle_s)))
        risen = now - before
        if risen <= SURE * noise or now <= 0.0:
            return 1.0
        risen -= (SHRUNK * noise) ** 2 / risen
        slope = risen / ((at_s - first_s) / 2)
        return 1.0 + slope * (ahead_s + (at_s - middle_s) / 2) / now

    def _note(self, at_s: float, per_s: float, season_s: float) -> None:
        turn, place = divmod(at_s, season_s)
        if self._turn is not None and turn != self._turn:
            has_all = sum(count > 0 for count in self._seen) > 0.9 * self._bins
            if has_all:
                self._last = _smooth([part / max(1, n) for part, n in zip(self._sums, self._seen, strict=True)])
            self._sums, self._seen = [0.0] * self._bins, [0] * self._bins
        self._turn = int(turn)
        number = int(place / season_s * self._bins)
        self._sums[number] += per_s
        self._seen[number] += 1

    def _seasonal(self, at_s: float, ahead_s: float) -> float:
        if self._last is None or self._season_s is None:
            return 1.0
        here = int(at_s % self._season_s / self._season_s * self._bins)
        bins = max(1, math.ceil(ahead_s / self._season_s * self._bins))
        coming = max(self._last[(here + step) % self._bins] for step in range(bins + 1))
        floor = 0.1 * sum(self._last) / self._bins
        return coming / max(self._last[here], floor, 1e-9)


def _smooth(bins: list[float]) -> list[float]:
    return [(bins[number - 1] + bins[number] + bins[(number + 1) % len(bins)]) / 3 for number in range(len(bins))]
