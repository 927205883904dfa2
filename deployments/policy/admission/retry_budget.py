"""How many sessions may be placed again whose last placement came to nothing: retries must not multiply failures.

Those that had more than a first token go on for nothing: each answers a loss of its own. Pure.
"""

from __future__ import annotations

from collections import deque

RETRY_BUDGET = "retry_budget"
"""The code of a refusal for want of budget: to be asked again in a moment."""
RETRY_AFTER_S = 0.5
WINDOW_S = 10.0
LEAST = 16


class RetryBudget:
    """In any `window_s` seconds, no more second and later placements than first ones and open sessions, and `least`.

    So all sessions of a replica that dies can move, and a fleet on which everything fails is asked twice as much and
    no more. The idea is Finagle's.
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
        """Whether one more may be placed again; counts it if so."""
        self._forget(self._first, now_s)
        self._forget(self._again, now_s)
        if len(self._again) >= len(self._first) + open_sessions + self._least:
            return False
        self._again.append(now_s)
        return True

    def _forget(self, times: deque[float], now_s: float) -> None:
        while times and times[0] <= now_s - self._window_s:
            times.popleft()
