"""Starts in flight: replicas that were asked for and are not ready yet. Pure."""

from __future__ import annotations


class StartsInFlight:
    """The starts of one pool, by the times when they were asked for, in seconds of the caller's clock.

    A replica that takes long to be placed reports nothing, and one that crashes while it loads is started again. So
    reports do not count. A start is a replica that the pool lacks to its target, and is as old as the lack is.
    """

    def __init__(self) -> None:
        self._since: list[float] = []
        self._ready = 0

    def ages(self, target: int, ready: int, now_s: float) -> tuple[float, ...]:
        """The age of each start, the oldest first. `ready`: replicas that take sessions now.

        Of several starts the oldest counts as the one that became ready, and the newest as the one that is asked for no
        more.
        """
        lacking = max(0, target - ready)
        became_ready = min(max(0, ready - self._ready), max(0, len(self._since) - lacking))
        self._since = self._since[became_ready:][:lacking]
        self._since += [now_s] * (lacking - len(self._since))
        self._ready = ready
        return tuple(now_s - since for since in self._since)
