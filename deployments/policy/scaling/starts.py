"""How long starts take, and which are given up. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from deployments.policy.scaling.inputs import PoolNow

UNKNOWN_S = 60.0
"""How long a start is expected to take before one was measured."""
KEPT = 8


class Starts:
    """Measures the starts of every pool. `timeout_s`: a start that is older is given up."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._took_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._before: dict[str, tuple[float, PoolNow]] = {}
        self._blocked_until_s: dict[str, float] = {}

    def look(self, pool: PoolNow, at_s: float) -> bool:
        """Take a pool's starts. True when a replica has become ready since the last look."""
        then_s, before = self._before.get(pool.name, (at_s, pool))
        self._before[pool.name] = at_s, pool
        if self.given_up(pool):
            self._blocked_until_s[pool.name] = at_s + self._timeout_s
        done = min(pool.ready - before.ready, len(before.starting))
        for age_s in sorted(before.starting, reverse=True)[: max(0, done)]:
            self._took_s[pool.name].append(age_s + (at_s - then_s) / 2)
        return pool.ready > before.ready

    def given_up(self, pool: PoolNow) -> int:
        """The number of a pool's starts that take too long."""
        return sum(age_s > self._timeout_s for age_s in pool.starting)

    def is_blocked(self, name: str, at_s: float) -> bool:
        """Whether a start of this pool was given up lately, so that no other one is asked for."""
        return at_s < self._blocked_until_s.get(name, at_s)

    def takes_s(self, name: str) -> float:
        """How long a start of this pool takes: the median of the last ones."""
        took_s = self._took_s.get(name)
        return median(took_s) if took_s else UNKNOWN_S

    def measured(self) -> dict[str, float]:
        """The same of every pool of which a start was measured."""
        return {name: round(median(took_s), 3) for name, took_s in self._took_s.items()}
