"""What each group of pools is asked for: the arrivals of now, as they will be when a start would be over. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from configs.schema import BatonConfig
from deployments.messages import Role
from deployments.policy.admission.classes import PriorityClasses
from deployments.policy.scaling.answers import AnswersNow
from deployments.policy.scaling.history import History
from deployments.policy.scaling.inputs import NONE, Arrivals, Now, PoolNow, Waiting
from deployments.policy.scaling.predict import ClassLoad, Load, prefill_s
from deployments.policy.scaling.sizing import Group

SHARE_WEIGHT = 0.1
"""The weight of a new look in the share of the load that goes to each group."""
LEAST_SHARE = 0.01
"""A smaller share is none, so that a pool without work can go to zero."""
DRAIN_S = 30.0
"""What is left of a backlog when a start is over shall be gone in so many seconds more."""

Pools = Mapping[str, PoolNow]


class Loads:
    """Divides the load among the groups as it was divided lately: at first as their roles say."""

    def __init__(self, config: BatonConfig, groups: Sequence[Group]) -> None:
        self._classes = PriorityClasses.of(config)
        self._own_share = config.placement.prompt_share
        self._groups, self._answers = groups, AnswersNow()
        self._shares: dict[Group, tuple[float, float]] = {}

    def of(self, now: Now, pools: Pools, history: History, growth: float, start_s: float) -> dict[Group, Load]:
        """The load of each group. `growth`: see `Forecast`. `start_s`: how long a start takes."""
        per_s = history.per_s()
        self._divide(pools)
        classes = tuple(self._class(name, each.times(growth)) for name, each in per_s.items())
        answers = self._answers.look(now, per_s, _mean_prefill_s(pools, per_s), history.chance).times(growth)
        whole = Load(classes, *answers, burst=history.burst, own_share=self._own_share)
        whole = replace(whole, token_s=self._answers.token_s)
        found = {}
        for group in self._groups:
            load = whole.part(*self._shares[group])
            mine = [pools[name] for name in group.names]
            backlog = 0.0 if group.role is Role.DECODE else _backlog(mine, load, now.waiting, start_s)
            found[group] = replace(load, backlog=backlog)
        return found

    def class_of(self, name: str) -> str:
        """The class that a request asks for by this name; "" is the default."""
        return self._classes.resolve(name).name

    def _class(self, name: str, per_s: Arrivals) -> ClassLoad:
        known = self._classes.resolve(name)
        return ClassLoad(known.name, known.rank, known.ttft_s or math.inf, known.tpot_s or math.inf, per_s)

    def _divide(self, pools: Pools) -> None:
        """All prompts are for prefill and mixed pools, and all answers for decode and mixed pools.

        Placement may mix the roles more than that, where it costs less. That is not counted on: with it the sizes
        would hang on each other, and the pools would wander.
        """
        prompts = {
            g: sum(pools[name].prefill_load for name in g.names) for g in self._groups if g.role is not Role.DECODE
        }
        answers = {g: sum(pools[name].answers for name in g.names) for g in self._groups if g.role is not Role.PREFILL}
        for group in self._groups:
            before = self._shares.get(
                group, (_first(group, prompts, Role.PREFILL), _first(group, answers, Role.DECODE))
            )
            self._shares[group] = _toward(before[0], group, prompts), _toward(before[1], group, answers)


def _first(group: Group, parts: Mapping[Group, float], role: Role) -> float:
    """The share of a group before anything was seen: what has a role of its own for it gets all."""
    able = [each for each in parts if each.role is role] or list(parts)
    return 1.0 / len(able) if group in able else 0.0


def _backlog(pools: Sequence[PoolNow], load: Load, waiting: Waiting, start_s: float) -> float:
    """The replicas that earlier prompts keep busy when a start would be over, if what is left shall go in `DRAIN_S`.

    What the replicas of now have computed until then counts for nothing. One prompt keeps one replica busy at most.
    """
    steps = pools[0].steps
    if steps is None:
        return 0.0
    queued_s = sum(pool.backlog_s for pool in pools) + steps.prefill_token_s * waiting.prefill_tokens
    busy = sum(each.per_s.requests * prefill_s(steps, pools[0].chunk_tokens, each.per_s)[0] for each in load.classes)
    left_s = queued_s - max(0.0, sum(pool.ready for pool in pools) - busy) * start_s
    prompts = waiting.prefill + sum(max(0.0, pool.sessions - pool.answers) for pool in pools)
    return min(max(0.0, left_s) / DRAIN_S, prompts)


def _mean_prefill_s(pools: Pools, per_s: Mapping[str, Arrivals]) -> float:
    """The mean seconds of a prompt, where prompts are computed."""
    whole = NONE
    for each in per_s.values():
        whole = whole.plus(each)
    able = [pool for pool in pools.values() if pool.role is not Role.DECODE and pool.steps is not None]
    return prefill_s(able[0].steps, able[0].chunk_tokens, whole)[0] if able and able[0].steps else 0.0


def _toward(before: float, group: Group, parts: Mapping[Group, float]) -> float:
    whole = sum(parts.values())
    if group not in parts or whole < 0.01:
        return before
    share = before + SHARE_WEIGHT * (parts[group] / whole - before)
    return share if share >= LEAST_SHARE else 0.0
