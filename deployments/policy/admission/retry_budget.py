"""The retry budget: how many lost sessions may be placed again, so that retries do not multiply failures. Pure.

A session that had more than a first token needs no budget, because its retry does not repeat one that failed at once.
"""

from __future__ import annotations

from collections import deque

RETRY_BUDGET = "retry_budget"
"""The code of a refusal because the budget is used up; the caller asks again in a moment."""

RETRY_AFTER_S = 0.5
"""When such a caller asks again."""

WINDOW_S = 10.0
"""The window in which placements are counted."""

LEAST = 16
"""Retries that are always allowed in a window."""


class RetryBudget:
    """In any window of `window_s` seconds, at most `first placements + open sessions + least` retries.

    So all sessions of a replica that dies can go on elsewhere, and a fleet on which every placement fails gets at most
    about twice the load. The idea is Finagle's.
    """

    def __init__(self, window_s: float = WINDOW_S, least: int = LEAST) -> None:
        self._window_s, self._least = window_s, least
        self._first: deque[float] = deque()
        self._again: deque[float] = deque()

    def opened(self, now_s: float) -> None:
        """A session was opened for the first time."""
        self._forget(self._first, now_s)
        self._first.append(now_s)

    def take(self, now_s: float, open_sessions: int) -> bool:
        """Whether one more session may be placed again; counts it if so."""
        self._forget(self._first, now_s)
        self._forget(self._again, now_s)
        if len(self._again) >= len(self._first) + open_sessions + self._least:
            return False
        self._again.append(now_s)
        return True

    def _forget(self, times: deque[float], now_s: float) -> None:
        while times and times[0] <= now_s - self._window_s:
            times.popleft()
