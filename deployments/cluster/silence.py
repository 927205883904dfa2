"""Replicas that have fallen silent: stopped or cut off, without being dead.

Parts on such a replica do not end. The core notices that a session has had no output for long, and asks the session
manager whether it still hears of the session's replicas.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from deployments.cluster.attempt import Attempt
from deployments.cluster.notices import Notices
from deployments.cluster.timings import Timings
from deployments.messages import Role


class SilenceWatch:
    """`attempts`: the placements that run, as the core keeps them."""

    def __init__(self, attempts: Mapping[str, Attempt], notices: Notices, timings: Timings) -> None:
        self._attempts, self._notices, self._timings = attempts, notices, timings
        self._counts = Counter[str]()

    async def run(self) -> None:
        """Check the running placements from time to time, without end."""
        while True:
            await asyncio.sleep(self._timings.watch_s)
            waiting = self._waiting_for()
            silent = await self._notices.silent(tuple(waiting)) if waiting else ()
            for replica_id in self._silent_for_long(silent):
                self._lose(replica_id, waiting[replica_id])

    def _waiting_for(self) -> dict[str, list[tuple[Attempt, Role]]]:
        """The replicas of the placements that have had no output for long, by id."""
        found = defaultdict[str, list[tuple[Attempt, Role]]](list)
        quiet_since_s = time.monotonic() - self._timings.quiet_s
        for attempt in self._attempts.values():
            if attempt.heard_s <= quiet_since_s:
                for role, replica in attempt.running_on():
                    found[replica.replica_id].append((attempt, role))
        return found

    def _silent_for_long(self, silent: Collection[str]) -> list[str]:
        """The replicas that were silent each time the manager was asked, often enough."""
        self._counts = Counter({replica_id: self._counts[replica_id] + 1 for replica_id in silent})
        return [replica_id for replica_id, times in self._counts.items() if times >= self._timings.silent_times]

    def _lose(self, replica_id: str, waiting: list[tuple[Attempt, Role]]) -> None:
        notice = self._notices.replica_lost(replica_id)
        for attempt, role in waiting:
            attempt.replica_lost(role, "it does not report", notice)
