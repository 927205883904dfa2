"""What the session manager tells for Prometheus, read from its books. Nothing is counted for it session by session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from deployments.manager.scaling import Scaling
from deployments.manager.status import Counts
from deployments.messages import Phase
from deployments.metrics import catalogue as names
from deployments.metrics.registry import Registry
from deployments.policy.allocator import Allocator

COVERAGE = {"0.5": "coverage_p50", "0.9": "coverage_p90"}
NOW = (names.PROMISED, names.USED, names.PINNED, names.TOTAL, names.READY)


class ManagerMeter:
    """Brings the manager's metrics up to date.

    `registry`: has `model_name` and `policy`. `handed_on`: see `Draining.counts`. `clock`: the manager's.
    """

    def __init__(
        self,
        registry: Registry,
        allocator: Allocator,
        counts: Counts,
        handed_on: Mapping[str, int],
        scaling: Scaling | None,
        clock: Callable[[], float],
    ) -> None:
        self._registry, self._allocator, self._counts, self._handed_on = registry, allocator, counts, handed_on
        self._scaling, self._clock = scaling, clock

    async def collect(self) -> None:
        """One round."""
        now_s = self._clock()
        self._sessions(now_s)
        self._pools(now_s)
        if self._scaling is not None:
            self._plan(self._scaling)

    def _sessions(self, now_s: float) -> None:
        value, counts, allocator = self._registry.value, self._counts, self._allocator
        for (mode, reason), count in counts.placements.items():
            value(names.PLACEMENTS, mode=mode, reason=reason).set(count)
        for code, count in counts.rejects.items():
            value(names.REFUSALS, code=code).set(count)
        for outcome, count in counts.outcomes.items():
            value(names.CLOSED, outcome=outcome).set(count)
        for outcome in ("came", "failed"):
            value(names.HANDED_ON, outcome=outcome).set(self._handed_on.get(outcome, 0))
        value(names.HANDED_ON_BLOCKS).set(self._handed_on.get("blocks", 0))
        value(names.LET_GO).set(allocator.giving_way.count)
        value(names.OPEN).set(len(allocator.fleet.promises()))
        for name, waiting in allocator.room.queued().items():
            value(names.QUEUED, **{"class": name}).set(waiting)
        if allocator.spread is not None:
            value(names.COPIES).set(allocator.spread.told)
        value(names.BREAKERS).set(len(allocator.breakers.shut(now_s)))
        calibration = allocator.predictors.lengths.calibration()
        for quantile, name in COVERAGE.items():
            if (share := calibration[name]) is not None:
                value(names.COVERAGE, quantile=quantile).set(share)

    def _pools(self, now_s: float) -> None:
        """Promises against use, by pool."""
        fleet, phases = self._allocator.fleet, self._allocator.fleet.phases(now_s)
        promised = Counter[str]()
        for promise in fleet.promises():
            promised[promise.placement.owner.pool] += promise.placement.reserved_blocks
        used, pinned, total = Counter[str](), Counter[str](), Counter[str]()
        for snapshot in fleet.snapshots().values():
            if snapshot.info is not None:
                used[snapshot.info.pool] += snapshot.used_blocks
                pinned[snapshot.info.pool] += snapshot.pinned_blocks
                total[snapshot.info.pool] += snapshot.info.total_blocks
        for pool, replicas in phases.items():
            ready = sum(each.fresh and each.phase is Phase.READY for each in replicas.values())
            numbers = promised[pool], used[pool], pinned[pool], total[pool], ready
            for metric, number in zip(NOW, numbers, strict=True):
                self._registry.value(metric, pool=pool).set(number)

    def _plan(self, scaling: Scaling) -> None:
        value = self._registry.value
        if (plan := scaling.plan) is not None:
            for pool in scaling.pools:
                value(names.TARGET, pool=pool).set(plan.targets[pool])
                value(names.SHORT, pool=pool).set(plan.short == pool)
        for (pool, direction, code), count in scaling.decisions.items():
            value(names.DECISIONS, pool=pool, direction=direction, reason=code).set(count)
        for (pool, code), count in scaling.reasons.items():
            value(names.PLANS, pool=pool, reason=code).set(count)
        value(names.FAILURES).set(scaling.failures)
