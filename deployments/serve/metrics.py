"""A replica's sessions and the manager's plan among Serve's metrics. Serve does not see sessions in its own."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ray.serve.metrics import Counter, Gauge

from deployments.manager.scaling import Scaling

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


async def publish_plan(scaling: Scaling) -> None:
    """Bring the metrics of the plan up to date every second, without end."""
    tags = ("pool",)
    target = Gauge("baton_scaling_target", description="Replicas that the pool should have.", tag_keys=tags)
    short = Gauge("baton_scaling_short", description="1 for the pool that lacks most, 0 for others.", tag_keys=tags)
    decisions = Counter(
        "baton_scaling_decisions", description="Changed targets, by direction.", tag_keys=("pool", "direction")
    )
    told = dict[tuple[str, str], int]()
    while True:
        if (plan := scaling.plan) is not None:
            for pool in scaling.pools:
                target.set(plan.targets[pool], tags={"pool": pool})
                short.set(float(plan.short == pool), tags={"pool": pool})
        for (pool, direction), count in scaling.decisions.items():
            if (more := count - told.get((pool, direction), 0)) > 0:
                decisions.inc(more, tags={"pool": pool, "direction": direction})
                told[pool, direction] = count
        await asyncio.sleep(EVERY_S)
