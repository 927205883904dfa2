"""The plan: how many replicas each pool has, and why. Pure.

`docs/concepts/scaling.md` explains every rule. A plan is a size for each pool, not a step: what starts already is part
of it, so no replica is asked for twice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import replace

from configs.checks import bounds_of
from configs.schema import BatonConfig, ScalingConfig
from deployments.messages import Role
from deployments.policy.scaling.budget import within
from deployments.policy.scaling.draft import Draft
from deployments.policy.scaling.forecast import Forecast
from deployments.policy.scaling.history import History
from deployments.policy.scaling.inputs import Now, Plan, PoolNow, Predicted
from deployments.policy.scaling.loads import Loads
from deployments.policy.scaling.predict import Load
from deployments.policy.scaling.reasons import Reason
from deployments.policy.scaling.sizing import Group, Sizes, Sizing, groups_of
from deployments.policy.scaling.starts import Starts

NEARLY = 1e-6
"""Sums of floats that differ by less are equal."""
AT_ONCE = 20
"""One of so many replicas of a pool stops in a plan, and at least one."""


class Planner:
    """Makes a plan every interval. Its state is the history of the load, of starts and of its own decisions."""

    def __init__(self, config: BatonConfig) -> None:
        self._config = config.scaling or ScalingConfig()
        self._groups = groups_of(config)
        bounds = {name: bounds_of(pool) for name, pool in config.pools.items()}
        self._least = {name: bound[0] for name, bound in bounds.items()}
        self._most = {name: bound[1] for name, bound in bounds.items()}
        self._costs = {name: pool.cost for name, pool in config.pools.items()}
        self._history, self._forecast = History(), Forecast(self._config.season_s, self._config.interval_s)
        self._starts, self._loads = Starts(self._config.start_timeout_s), Loads(config, self._groups)
        self._shapes: dict[str, PoolNow] = {}
        self._needs: defaultdict[Group, deque[tuple[float, float]]] = defaultdict(deque)
        self._held_until_s: dict[Group, float] = {}
        self._worked_s: dict[Group, float] = {}

    def plan(self, now: Now) -> Plan:
        """The sizes of all pools from now on. Call it every `scaling.interval_s`, with times that do not go back."""
        pools = self._look(now)
        start_s = max(self._starts.takes_s(name) for name in pools)
        growth = self._forecast.growth(now.at_s, start_s + self._config.interval_s, self._history.burst)
        loads = self._loads.of(now, pools, self._history, growth, start_s)
        draft, carried = Draft(now, pools, growth), 1.0
        for group in self._groups:
            if group.role is Role.PREFILL:
                self._size(group, loads[group].part(carried, 1.0), draft)
            else:
                carried = min(carried, self._size(group, loads[group], draft))
        if carried < 1.0:
            draft.note_prefill(f"decode carries {carried:.0%} of the load, so only that counts")
        self._afford(draft)
        return Plan(
            now.at_s,
            draft.targets,
            draft.reasons,
            draft.short,
            draft.predicted,
            self._starts.measured(),
            round(growth, 3),
            self._cost(draft.targets),
            self._config.dry_run,
            draft.codes,
        )

    # ---- what is seen

    def _look(self, now: Now) -> dict[str, PoolNow]:
        """Take what is seen now. Returns the pools, each with the shape that it had last where no replica is ready."""
        self._history.look(now)
        arrived = sum(each.requests for each in now.arrived.values())
        self._forecast.look(now.at_s, arrived, self._history.requests_per_s)
        came = {self._loads.class_of(name) for name in self._history.came_within(1.5 * self._config.interval_s)}
        for group in self._groups:
            waits = not group.classes and bool(now.waiting.prefill or now.waiting.decode)
            is_asked = waits or bool(came & group.classes if group.classes else came)
            mine = [pool for pool in now.pools if pool.name in group.names]
            has_started = [self._starts.look(pool, now.at_s) for pool in mine]
            if group not in self._worked_s:  # a manager that has just begun does not know what was needed before
                self._held_until_s[group] = now.at_s + self._config.shrink_after_s
            if is_asked or any(pool.sessions for pool in mine) or group not in self._worked_s:
                self._worked_s[group] = now.at_s
            if any(has_started):
                self._hold(group, now.at_s)
        return {pool.name: self._shaped(pool) for pool in now.pools}

    def _shaped(self, pool: PoolNow) -> PoolNow:
        if pool.ready:
            self._shapes[pool.name] = pool
        last = self._shapes.get(pool.name)
        if last is None or pool.ready:
            return pool
        return replace(
            pool,
            steps=pool.steps or last.steps,
            blocks=last.blocks,
            block_size=last.block_size,
            max_sessions=last.max_sessions,
            chunk_tokens=last.chunk_tokens,
        )

    def _hold(self, group: Group, at_s: float) -> None:
        until_s = at_s + self._config.hold_intervals * self._config.interval_s
        self._held_until_s[group] = max(until_s, self._held_until_s[group])

    # ---- sizes

    def _size(self, group: Group, load: Load, draft: Draft) -> float:
        """Size one group. Returns the part of its load that its most replicas carry, up to 1."""
        at_s, pools = draft.now.at_s, {name: draft.pools[name] for name in group.names}
        sizing = Sizing(pools, load, self._config.headroom, self._costs, self._most)
        by_chance = replace(sizing, load=load.grown(self._history.chance))
        blocked = [name for name in group.names if self._starts.is_blocked(name, at_s)]
        base = {name: self._base(pool) for name, pool in pools.items()}
        is_idle = at_s - self._worked_s[group] >= self._config.idle_s
        least = self._awake(base, blocked, is_idle)
        need = sizing.units(sizing.enough(least))
        grown = sizing.enough({name: max(base[name], least[name]) for name in base}, blocked)
        self._note_need(group, at_s, need)
        self._settle(sizing, base, least, grown, draft)
        if grown != base:
            self._hold(group, at_s)
        elif sizing.strain(base) <= 1.0 and any(base[name] > least[name] for name in base):
            self._shrink(group, by_chance, base, least, draft)
        sizes = {name: draft.targets[name] for name in group.names}
        most = {name: size if name in blocked else self._most[name] for name, size in sizes.items()}
        draft.predicted.update(sizing.predict(sizes))
        draft.strained(group.names[0], sizing.strain({name: pool.ready for name, pool in pools.items()}))
        for name in blocked:
            draft.note_given_up(name)
        return min(1.0, 1.0 / max(sizing.strain(most), NEARLY))

    def _settle(self, sizing: Sizing, base: Sizes, least: Sizes, grown: Sizes, draft: Draft) -> None:
        """Give the pools of a group the sizes to which they grow from `base`, with the reasons."""
        load = sizing.load
        now = replace(sizing, load=replace(load.grown(1.0 / draft.growth), backlog=load.backlog))
        is_enough_now = draft.growth > 1.0 and any(base.values()) and now.strain(base) <= 1.0
        for name, found in sizing.predict(base).items():
            why = f"with {base[name]}, {found.because}"
            if grown[name] == base[name]:
                code = self._stays(name, base[name], least[name], found)
            elif not any(base.values()):
                code = Reason.WAKE
            elif is_enough_now:
                why, code = f"{why}, as the load is expected to grow", Reason.FORECAST_FLOOR
            else:
                code = found.code
            draft.settle(name, grown[name], why, code)

    def _stays(self, name: str, size: int, least: int, found: Predicted) -> Reason:
        """The code of a pool that does not grow, until `_shrink` knows better."""
        if found.strain > 1.0:
            return Reason.MOST if size >= self._most[name] else Reason.OTHER_POOL
        if size > least:
            return Reason.OTHER_POOL
        return Reason.LEAST if size else Reason.IDLE_ZERO

    def _base(self, pool: PoolNow) -> int:
        """The size of a pool without the starts that are given up, within its bounds."""
        size = pool.target - self._starts.given_up(pool)
        return min(max(size, self._least[pool.name]), self._most[pool.name])

    def _awake(self, base: Mapping[str, int], blocked: Collection[str], is_idle: bool) -> dict[str, int]:
        """The least sizes. One pool of a group that has work has a replica, where all might have none."""
        least = {name: self._least[name] for name in base}
        if not is_idle and not any(least.values()):
            able = [name for name in base if name not in blocked] or list(base)
            least[min(able, key=lambda name: (base[name] == 0, self._costs[name]))] = 1
        return least

    def _note_need(self, group: Group, at_s: float, need: float) -> None:
        needs, start_s = self._needs[group], max(self._starts.takes_s(name) for name in group.names)
        needs.append((at_s, need))
        while needs[0][0] < at_s - max(self._config.shrink_after_s, 2.0 * start_s):
            needs.popleft()

    def _shrink(self, group: Group, sizing: Sizing, base: dict[str, int], least: dict[str, int], draft: Draft) -> None:
        """Fewer of one pool, where that was enough for long and still is, with as much more as chance may bring."""
        at_s = draft.now.at_s
        fewer = sizing.one_fewer(base, least)
        needed_s, most = max(self._needs[group], key=lambda need: need[1])
        held_s = self._held_until_s.get(group, at_s) - at_s
        if held_s > 0.0:
            why, code = f"it grew lately, or was first seen, and keeps its size for {held_s:.0f} s", Reason.HOLD
        elif fewer is None and any(each.code is Reason.SPEED_UNKNOWN for each in sizing.predict(base).values()):
            why, code = "its speed is not known yet", Reason.SPEED_UNKNOWN
        elif fewer is None:
            why, code = "one replica less would be too few", Reason.NEEDED
        elif sizing.units(fewer[0]) < most - NEARLY:
            why, code = f"more were needed {at_s - needed_s:.0f} s ago", Reason.NEEDED_LATELY
        else:
            sizes, name = fewer
            for _ in range(base[name] // AT_ONCE - 1):
                further = sizing.one_fewer(sizes, least)
                if further is None or further[1] != name or sizing.units(further[0]) < most - NEARLY:
                    break
                sizes = further[0]
            code = Reason.SPARE if sizes[name] else Reason.IDLE_ZERO
            draft.settle(name, sizes[name], f"that is still enough: {sizing.predict(sizes)[name].because}", code)
            return
        for name in group.names:
            draft.explain(name, why, code)

    # ---- money

    def _cost(self, sizes: Mapping[str, int]) -> float:
        return sum(self._costs[name] * size for name, size in sizes.items())

    def _afford(self, draft: Draft) -> None:
        limit = self._config.max_cost_per_hour
        if limit is None or self._cost(draft.targets) <= limit:
            return
        least = {name: self._least[name] for name in draft.targets}
        for name, size in within(draft.targets, least, self._costs, limit).items():
            if size < (wanted := draft.targets[name]):
                draft.settle(name, size, f"{wanted} are wanted, and max_cost_per_hour is {limit:g}", Reason.BUDGET)
