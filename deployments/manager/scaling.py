"""The manager's part in scaling: it makes a plan every interval, and tells and explains it. The planner decides.

Plain Python. Serve carries the plan out: `deployments.serve.scaling`.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from configs.checks import bounds_of
from configs.schema import BatonConfig, ScalingConfig
from deployments.manager.starts import StartsInFlight
from deployments.messages import Phase
from deployments.policy.allocator import Allocator
from deployments.policy.scaling.inputs import Plan
from deployments.policy.scaling.observe import observe
from deployments.policy.scaling.planner import Planner

logger = logging.getLogger("baton.scaling")

LISTEN_S = 60.0
"""The longest time in which a manager that has begun waits for the replicas that Serve has to report."""
FOLLOWED_S = 30.0
"""Serve hears of a plan within so many seconds, also with the longest interval of its numbers."""

NOT_FOLLOWED = (
    "Serve keeps %d replicas of %s, and the plan has %d: does the application have "
    "`autoscaling_policy: {policy_function: deployments.serve.scaling:planned}`?"
)


class Size(NamedTuple):
    """Replicas that Serve has of a pool: `running`, and `coming` ones that it starts. `settled`: it wants no change."""

    running: int
    coming: int
    settled: bool


class Scaling:
    """Plans, one after the other. `clock`: seconds, monotonic. All methods run on one event loop.

    `plan`: the newest; None before the first. Counted since the manager began: `decisions`, changed targets by pool,
    direction ("up" or "down") and code of the reason; `reasons`, all plans by pool and code; `failures`, plans that
    failed.
    """

    def __init__(
        self, config: BatonConfig, scaling: ScalingConfig, allocator: Allocator, clock: Callable[[], float]
    ) -> None:
        self._config, self._allocator, self._clock = scaling, allocator, clock
        self._bounds = {name: bounds_of(pool) for name, pool in config.pools.items()}
        self.pools = tuple(name for name, pool in config.pools.items() if pool.autoscaling is not None)
        self._planner = Planner(config)
        self._starts = {name: StartsInFlight() for name in config.pools}
        self._began_s = clock()
        self._starting: dict[str, tuple[float, ...]] = {}
        self._queue_timeout_s, self._lacked = config.placement.queue_timeout_s, False
        self._unfollowed_s: dict[str, float] = {}
        self._doubted: set[str] = set()
        self._failure: str | None = None
        self._known_failures: set[tuple[str, str, int | None]] = set()
        self.failures = 0
        self.plan: Plan | None = None
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()

    async def run(self, sizes: Callable[[], Awaitable[Mapping[str, Size] | None]], planned: Callable[[], None]) -> None:
        """Make a plan every `scaling.interval_s`, without end. `sizes`: asks Serve; None when it does not say.
        `planned`: called after every plan, which may have changed how long requests wait.

        Where a plan fails, the last one stays, and the next one is made in its time.
        """
        while True:
            await asyncio.sleep(self._config.interval_s)
            try:
                self.think(await sizes())
                planned()
            except Exception as error:  # noqa: BLE001 - a bug of ours, counted, shown and logged; the fleet goes on
                self._failed(error)
            else:
                self._failure = None

    def think(self, sizes: Mapping[str, Size] | None) -> Plan | None:
        """Make the next plan. None while a manager that has just begun does not know all replicas yet."""
        now_s = self._clock()
        ready = self._ready(now_s)
        if self.plan is None and not self._has_listened(ready, sizes, now_s):
            return None
        targets = self._targets(ready, sizes)
        self._check_followed(sizes, now_s)
        self._starting = {name: self._starts[name].ages(targets[name], ready[name], now_s) for name in targets}
        self._keep_waiting(now_s)
        plan = self._planner.plan(observe(self._allocator, targets, now_s, targets, self._starting))
        self._note(plan, targets)
        self.plan = plan
        return plan

    def told(self) -> dict[str, int]:
        """The replicas that each pool should have, for Serve; empty when nothing is to be changed."""
        if self.plan is None or self._config.dry_run:
            return {}
        return {name: self.plan.targets[name] for name in self.pools}

    def explain(self) -> dict[str, Any]:
        """The newest plan, for `/baton/status`."""
        failed = {"failure": self._failure, "failures": self.failures}
        if (plan := self.plan) is None:
            return {"dry_run": self._config.dry_run, "age_s": None, **failed, "pools": {}}
        now_s = self._clock()
        ready = self._ready(now_s)
        shown = {key: value for key, value in asdict(plan).items() if key not in _BY_POOL and key != "at_s"}
        pools = {
            name: {
                "target": target,
                "ready": ready.get(name, 0),
                "starting_s": [round(age_s, 1) for age_s in self._starting.get(name, ())],
                "reason": plan.reasons[name],
                "code": plan.codes[name],
                "bounds": list(self._bounds[name][:2]),
                "start_s": plan.start_s.get(name),
                "predicted": asdict(plan.predicted[name]) if name in plan.predicted else None,
                "followed": now_s - self._unfollowed_s.get(name, now_s) < FOLLOWED_S,
            }
            for name, target in plan.targets.items()
        }
        return {**shown, "age_s": round(now_s - plan.at_s, 3), **failed, "pools": pools}

    # ---- what a plan is made from

    def _ready(self, now_s: float) -> dict[str, int]:
        """The replicas of each pool that take sessions."""
        phases = self._allocator.fleet.phases(now_s)
        return {
            name: sum(each.fresh and each.phase is Phase.READY for each in phases.get(name, {}).values())
            for name in self._bounds
        }

    def _has_listened(self, ready: Mapping[str, int], sizes: Mapping[str, Size] | None, now_s: float) -> bool:
        """Whether the replicas that run have reported. So a manager that restarts does not take them for lost."""
        if now_s - self._began_s >= LISTEN_S:
            return True
        return sizes is not None and all(
            ready[name] >= size.running for name, size in sizes.items() if name in self._bounds
        )

    def _targets(self, ready: Mapping[str, int], sizes: Mapping[str, Size] | None) -> dict[str, int]:
        """The replicas that each pool was asked for last: by the last plan, or by what Serve has."""
        if self.plan is not None and not self._config.dry_run:
            return {name: self.plan.targets[name] for name in self._bounds}
        targets = {}
        for name, (least, most, _) in self._bounds.items():
            size = (sizes or {}).get(name)
            targets[name] = max(least, min(most, ready[name] if size is None else size.running + size.coming))
        return targets

    def _keep_waiting(self, now_s: float) -> None:
        """Let requests wait for the first replica of a kind, as of a pool at zero, until its start is given up.

        Once it is there, what waits has as long as ever.
        """
        ready = [view.info for view in self._allocator.fleet.view(now_s).ready]
        lacks = not (any(each.decodes for each in ready) and any(each.prefills for each in ready))
        ages = [age_s for each in self._starting.values() for age_s in each] if lacks else []
        if ages:
            self._allocator.room.keep_until_s = now_s - min(ages) + self._config.start_timeout_s
        elif self._lacked:
            self._allocator.room.keep_until_s = 0.0 if lacks else now_s + self._queue_timeout_s
        self._lacked = bool(ages)

    # ---- what became of it

    def _note(self, plan: Plan, before: Mapping[str, int]) -> None:
        """Count the reason of each target, and count and log the targets that change."""
        if self._config.dry_run and self.plan is not None:
            before = self.plan.targets
        for name in self.pools:
            old, new = before[name], plan.targets[name]
            code = plan.codes[name]
            self.reasons[name, code] += 1
            if new == old:
                continue
            self.decisions[name, "up" if new > old else "down", code] += 1
            verb = "would get" if self._config.dry_run else "gets"
            logger.warning("%s %s %d replicas, not %d (%s): %s", name, verb, new, old, code, plan.reasons[name])

    def _failed(self, error: Exception) -> None:
        """Count and show an error, and log each kind of it once: its type, and the line that raised it."""
        self.failures += 1
        self._failure = f"{type(error).__name__}: {error}"
        raised = traceback.extract_tb(error.__traceback__)[-1]
        kind = (type(error).__name__, raised.filename, raised.lineno)
        if kind not in self._known_failures:
            self._known_failures.add(kind)
            logger.error("No plan of sizes was made, so the last one stays: %s", self._failure, exc_info=error)

    def _check_followed(self, sizes: Mapping[str, Size] | None, now_s: float) -> None:
        """See whether Serve carries the last plan out. It does not where the application has no policy of its own."""
        if sizes is None or self.plan is None or self._config.dry_run:
            return
        for name in self.pools:
            size = sizes.get(name)
            if size is None or not size.settled or size.running == self.plan.targets[name]:
                self._unfollowed_s.pop(name, None)
                self._doubted.discard(name)
                continue
            since_s = self._unfollowed_s.setdefault(name, now_s)
            if now_s - since_s >= FOLLOWED_S and name not in self._doubted:
                self._doubted.add(name)
                logger.warning(NOT_FOLLOWED, size.running, name, self.plan.targets[name])


_BY_POOL = ("targets", "reasons", "codes", "predicted", "start_s")
