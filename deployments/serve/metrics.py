"""A replica's sessions among Serve's metrics. Serve does not see them in its own: they do not go through it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ray.serve.metrics import Counter, Gauge

EVERY_S = 1.0


class Counts(Protocol):
    """A replica, see `replica.Replica`."""

    @property
    def open_runs(self) -> int: ...

    @property
    def ended_runs(self) -> int: ...


async def publish(replica: Counts) -> None:
    """Bring the metrics up to date every second, without end. Ray labels them with deployment and replica."""
    running = Gauge("baton_sessions_running", description="Sessions that have a part on the replica.")
    ended = Counter("baton_sessions_ended", description="Parts of sessions that have ended on the replica.")
    told = 0
    while True:
        running.set(replica.open_runs)
        count = replica.ended_runs
        if count > told:
            ended.inc(count - told)
            told = count
        await asyncio.sleep(EVERY_S)
