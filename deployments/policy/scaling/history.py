"""The load of the last minutes: how many requests come, of what kind, how unevenly, and where they go. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from deployments.policy.scaling.inputs import NONE, Arrivals, Now

FAST_S, SLOW_S, KIND_S = 15.0, 60.0, 180.0
"""Seconds over which a sudden change shows, over which the rate is taken, and over which the kind of requests is."""
SURE = 4.0
"""A change is sudden where the last seconds had so many standard deviations more requests than the minute before."""
FEWEST = 3
"""So few requests of a class say nothing of its rate: a start would come too late for them."""
MOST_BURST, SLOWLY = 8.0, 0.01
"""The most that two looks count for, as a multiple of independent arrivals; the weight of a new look in it."""

Totals = Mapping[str, Arrivals]


class History:
    """Looks at the totals of all arrivals, and what they say of a second."""

    def __init__(self) -> None:
        self._burst = 1.0
        self._looks: deque[tuple[float, Totals]] = deque()

    def look(self, now: Now) -> None:
        """Take the totals of now. Totals that have become less are those of a new manager: all else is forgotten."""
        if self._looks and _count(now.arrived) < _count(self._looks[-1][1]):
            self._looks.clear()
        self._looks.append((now.at_s, dict(now.arrived)))
        while len(self._looks) > 2 and self._looks[1][0] <= now.at_s - KIND_S:
            self._looks.popleft()
        self._learn_burst()

    @property
    def burst(self) -> float:
        """How much more arrivals vary than independent ones, as a multiple; at least 1."""
        return max(1.0, self._burst)

    @property
    def requests_per_s(self) -> float:
        """All requests of the last minute, by second; more where there are suddenly more."""
        span_s, slow = self._since(SLOW_S)
        if span_s <= 0.0:
            return 0.0
        rate = _count(slow) / span_s
        return rate * self._sudden(rate)

    def per_s(self) -> dict[str, Arrivals]:
        """What comes in a second, by class: the kind of the last minutes at the rate of the last one."""
        span_s, slow = self._since(SLOW_S)
        if span_s <= 0.0:
            return {}
        sudden = self._sudden(_count(slow) / span_s)
        _, kinds = self._since(KIND_S)
        return {
            name: kinds[name].times(each.requests * sudden / span_s / kinds[name].requests)
            for name, each in slow.items()
            if each.requests >= FEWEST
        }

    @property
    def chance(self) -> float:
        """How much more may come in a minute by chance alone, as a multiple: three standard deviations of counting."""
        span_s, slow = self._since(SLOW_S)
        return 1.0 + 3.0 * math.sqrt(self.burst / max(_count(slow), 1.0)) if span_s > 0.0 else 1.0

    def came_within(self, seconds: float) -> bool:
        """Whether any request has come within so many seconds, at most `KIND_S`."""
        return _count(self._since(seconds)[1]) > 0

    def _since(self, seconds: float) -> tuple[float, dict[str, Arrivals]]:
        """The time that has passed and what has come in it, about the last so many seconds."""
        if not self._looks:
            return 0.0, {}
        at_s, totals = self._looks[-1]
        then_s, before = next(look for look in self._looks if look[0] >= at_s - seconds)
        came = {name: each.plus(before.get(name, NONE), -1.0) for name, each in totals.items()}
        return at_s - then_s, {name: each for name, each in came.items() if each.requests > 0}

    def _sudden(self, rate: float) -> float:
        """How many times as many requests have come in the last seconds as in the minute, where that is no chance."""
        span_s, fast = self._since(FAST_S)
        count, expected = _count(fast), rate * span_s
        if count - expected <= SURE * math.sqrt(self.burst * max(expected, 1.0)):
            return 1.0
        return count / max(expected, 1.0)

    def _learn_burst(self) -> None:
        """Two looks in a row differ by twice the variance of one, and a slow change of the rate adds little to that."""
        if len(self._looks) < 3:
            return
        (_, first), (_, middle), (_, last) = (self._looks[number] for number in (-3, -2, -1))
        before, now = _count(middle) - _count(first), _count(last) - _count(middle)
        if before + now >= FEWEST:
            seen = (now - before) ** 2 / (before + now)
            self._burst += SLOWLY * (min(seen, MOST_BURST) - self._burst)


def _count(totals: Totals) -> float:
    return sum(each.requests for each in totals.values())
