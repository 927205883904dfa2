"""A fleet in closed form that follows the planner: what it is asked for in a second, replicas that start and stop."""

from __future__ import annotations

import itertools
import random
from typing import Any

from configs.checks import bounds_of
from configs.schema import BatonConfig, role_of
from deployments.messages import Role
from deployments.policy.scaling.inputs import NONE, Arrivals, Now, Plan, PoolNow, Waiting
from deployments.policy.scaling.planner import Planner
from deployments.step_cost import Coefficients

PREFILL = Coefficients(0.01, 1e-4, 0.0, 1e-4, 1e-7)
DECODE = Coefficients(0.02, 1e-4, 0.0, 2e-4, 2e-8)
SPEEDS = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.MIXED: DECODE}
BLOCK, BLOCKS, PLACES = 16, 16_000, 128
INTERVAL_S = 5.0
CHAT = {"chat": {"ttft_s": 1.0, "tpot_s": 0.05}}


def config(pools: dict[str, Any] | None = None, classes: dict[str, Any] | None = None, **scaling: Any) -> BatonConfig:
    """A prefill and a decode pool of 1 to 20 replicas. `pools`: other sections, in place of those."""
    free = {"autoscaling": {"min_replicas": 1, "max_replicas": 20}, "engine": {"kind": "mock"}}
    sections = pools or {"prefill": free, "decode": {"main": free}}
    classes = CHAT if classes is None else classes
    placement = {"classes": classes, "default_class": next(iter(classes))} if classes else {}
    return BatonConfig.model_validate({**sections, "placement": placement, "scaling": scaling})


def asked(requests: float, prompt: float = 1000.0, output: float = 200.0, held: float = 1500.0) -> Arrivals:
    """So many requests of one length."""
    context = prompt * prompt / 2
    one = Arrivals(1.0, prompt, context, prompt**2, prompt * context, context**2, held, output)
    return one.times(requests)


class World:
    """`start_s`: how long a start takes; `room`: the replicas of a pool beyond which no start ends."""

    def __init__(self, config: BatonConfig, start_s: float = 30.0, room: dict[str, int] | None = None) -> None:
        self.planner, self.start_s, self.room = Planner(config), start_s, room or {}
        self.at_s = 0.0
        self.arrived: dict[str, Arrivals] = {}
        self.target = {name: bounds_of(pool)[2] for name, pool in config.pools.items()}
        self.ready = dict(self.target)
        self.starts: dict[str, list[float]] = {name: [] for name in self.target}
        self.waiting, self.backlog_s = Waiting(), 0.0
        self.speeds: dict[str, Coefficients] = {}
        self.plans: list[Plan] = []
        self.rng = random.Random(1)

    def run(self, seconds: float, per_s: dict[str, Arrivals] | None = None, noise: bool = False) -> Plan:
        """Let time pass with these arrivals in a second, by class. Returns the last plan."""
        for _ in range(round(seconds / INTERVAL_S)):
            self.step(per_s or {}, noise)
        return self.plans[-1]

    def step(self, per_s: dict[str, Arrivals], noise: bool = False) -> None:
        """One interval."""
        self.at_s += INTERVAL_S
        for name, each in per_s.items():
            came = self._poisson(each.requests * INTERVAL_S) / each.requests if noise else INTERVAL_S
            self.arrived[name] = self.arrived.get(name, NONE).plus(each, came)
        for name, starts in self.starts.items():
            done = [at_s for at_s in starts if self.at_s - at_s >= self.start_s]
            done = done[: max(0, self.room.get(name, 1 << 30) - self.ready[name])]
            self.starts[name] = [at_s for at_s in starts if at_s not in done]
            self.ready[name] += len(done)
        pools = tuple(self._pool(name, per_s) for name in self.target)
        plan = self.planner.plan(Now(self.at_s, pools, dict(self.arrived), self.waiting))
        self.plans.append(plan)
        if not plan.dry_run:
            self._follow(plan.targets)

    def _follow(self, targets: dict[str, int]) -> None:
        for name, size in targets.items():
            self.target[name] = size
            surplus = self.ready[name] + len(self.starts[name]) - size
            self.starts[name] += [self.at_s] * -surplus
            while surplus > 0 and self.starts[name]:
                self.starts[name].pop()
                surplus -= 1
            self.ready[name] -= max(0, surplus)

    def _pool(self, name: str, per_s: dict[str, Arrivals]) -> PoolNow:
        role, ready = Role(role_of(name)), self.ready[name]
        ages = tuple(self.at_s - at_s for at_s in self.starts[name])
        if not ready:
            return PoolNow(name, role, self.target[name], 0, ages)
        steps = self.speeds.get(name, SPEEDS[role])
        load = {"backlog_s": self.backlog_s, "prefill_load": 0.0} if role is not Role.DECODE else {}
        if role is not Role.PREFILL:
            load |= self._answers(
                steps, per_s, sum(each for other, each in self.ready.items() if "prefill" not in other)
            )
            load = {key: value * ready / max(1, self._decoding) for key, value in load.items()}
        if role is not Role.DECODE:
            busy = sum(
                each.requests * steps.prefill_s(round(each.new / each.requests), 0, 2048) for each in per_s.values()
            )
            load["prefill_load"] = busy
        return PoolNow(name, role, self.target[name], ready, ages, steps, BLOCKS, BLOCK, PLACES, 2048, **load)

    @property
    def _decoding(self) -> int:
        return sum(ready for name, ready in self.ready.items() if name != "prefill")

    def _answers(self, steps: Coefficients, per_s: dict[str, Arrivals], replicas: int) -> dict[str, float]:
        """Little's law, where an answer's tokens take as long as all answers make them take."""
        requests, output = (sum(getattr(each, name) for each in per_s.values()) for name in ("requests", "output"))
        if not requests:
            return {}
        held = sum(each.held for each in per_s.values()) / requests
        answers = 0.0
        for _ in range(20):
            token_s = steps.step_s(0, 0, answers / replicas, answers / replicas * held)
            answers = min(output * token_s, float(PLACES * replicas))
        return {"sessions": answers, "answers": answers, "promised": answers * held / BLOCK, "held": answers * held}

    def _poisson(self, mean: float) -> int:
        count, left = 0, self.rng.expovariate(1.0)
        while left < mean:
            count, left = count + 1, left + self.rng.expovariate(1.0)
        return count

    def reversals(self) -> int:
        """How often any target changed its direction."""
        found = 0
        for name in self.target:
            sizes = [plan.targets[name] for plan in self.plans]
            steps = [after > before for before, after in itertools.pairwise(sizes) if after != before]
            found += sum(one != other for one, other in itertools.pairwise(steps))
        return found
