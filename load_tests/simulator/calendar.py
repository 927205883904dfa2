"""Simulated time: which event happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

Act = Callable[..., None]


class Calendar:
    """Runs acts in the order of their times; at equal times, in the order of entry. `now_s`: the current act's time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.acts = 0
        self._entries: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._serial = count()

    def at(self, at_s: float, act: Act, *arguments: Any) -> None:
        """Schedule `act(*arguments)` for a time that has not passed."""
        heapq.heappush(self._entries, (at_s, next(self._serial), act, arguments))

    def step(self) -> None:
        """Run the next act. Raises IndexError when there is none."""
        self.now_s, _, act, arguments = heapq.heappop(self._entries)
        self.acts += 1
        act(*arguments)
