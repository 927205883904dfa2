"""The sizes of pools that share a load: enough at the least cost, and one fewer where that still does. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from configs.schema import BatonConfig, PoolConfig, role_of
from deployments.messages import Role
from deployments.policy.scaling.inputs import NONE, PoolNow, Predicted
from deployments.policy.scaling.predict import TINY, Load, predict, prefill_s
from deployments.policy.step_size import STEADY

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Group:
    """Pools of one role that take the same requests."""

    role: Role
    names: tuple[str, ...]


def groups_of(config: BatonConfig) -> tuple[Group, ...]:
    """The groups of a configuration: those that write answers first, because the others' load depends on theirs."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name, pool in config.pools.items():
        found.setdefault((Role(role_of(name)), *_takes(pool)), []).append(name)
    groups = [Group(Role(role_of(names[0])), tuple(names)) for names in found.values()]
    return tuple(sorted(groups, key=lambda group: group.role is Role.PREFILL))


def _takes(pool: PoolConfig) -> tuple[object, ...]:
    return pool.min_prompt_tokens, pool.max_prompt_tokens, frozenset(pool.classes), frozenset(pool.adapters)


@dataclass(frozen=True, slots=True)
class Sizing:
    """A group under its load. `pools`: by name. `costs`, `most`: of a replica of each, and its most replicas."""

    pools: Mapping[str, PoolNow]
    load: Load
    headroom: float
    costs: Mapping[str, float]
    most: Sizes

    def predict(self, sizes: Sizes) -> dict[str, Predicted]:
        """What is expected of each pool when they have these sizes and divide the load by what they can do."""
        prompts = _shares({name: size * self._speed(name) for name, size in sizes.items()})
        answers = _shares({name: size * self._room(name) for name, size in sizes.items()})
        return {
            name: predict(self._known(name), self.load.part(prompts[name], answers[name]), size, self.headroom)
            for name, size in sizes.items()
        }

    def strain(self, sizes: Sizes) -> float:
        """The largest strain of these pools; over 1 they are short."""
        if not any(sizes.values()):
            return predict(next(iter(self.pools.values())), self.load, 0, self.headroom).strain
        return max(each.strain for each in self.predict(sizes).values())

    def enough(self, sizes: Sizes, blocked: Collection[str] = ()) -> dict[str, int]:
        """These sizes and as many replicas more as are needed, where the most work is got for its cost."""
        found = dict(sizes)
        while self.strain(found) > 1.0:
            able = [name for name in found if found[name] < self.most[name] and name not in blocked]
            if not able:
                break
            found[max(able, key=self._worth)] += 1
        return found

    def one_fewer(self, sizes: Sizes, least: Sizes) -> tuple[dict[str, int], str] | None:
        """These sizes less one replica, and its pool, where the load as predicted then still does; None: it does not.

        The pool that gives the least work for its cost is asked first.
        """
        for name in sorted(sizes, key=self._worth):
            if sizes[name] > least[name] and self.strain(found := {**sizes, name: sizes[name] - 1}) < 1.0:
                return found, name
        return None

    def units(self, sizes: Sizes) -> float:
        """What these sizes can do, in replicas of the first pool."""
        first = max(self._work(next(iter(sizes))), TINY)
        return sum(size * self._work(name) for name, size in sizes.items()) / first

    def _worth(self, name: str) -> float:
        return self._work(name) / self.costs[name]

    def _work(self, name: str) -> float:
        """What one replica can do: prompts in a second, or answers at once."""
        pool = self._known(name)
        if pool.role is not Role.DECODE or not self.load.answers or pool.steps is None:
            return self._speed(name) if pool.role is not Role.DECODE else self._room(name)
        promised, held = self.load.promised / self.load.answers, self.load.held / self.load.answers
        by_memory = pool.blocks * pool.block_size / max(promised, 1.0)
        step = max(pool.steps.sequence_s + held * pool.steps.context_s, TINY)
        by_time = (STEADY * self.load.tpot_s - pool.steps.base_s) / step
        return max(min(by_memory, float(pool.max_sessions), by_time), TINY)

    def _speed(self, name: str) -> float:
        pool = self._known(name)
        whole = NONE
        for each in self.load.classes:
            whole = whole.plus(each.per_s)
        if pool.steps is None or not whole.requests:
            return 1.0
        return 1.0 / max(prefill_s(pool.steps, pool.chunk_tokens, whole)[0], TINY)

    def _room(self, name: str) -> float:
        return float(max(1, self._known(name).blocks))

    def _known(self, name: str) -> PoolNow:
        """The pool; one that was never seen is taken to be like the first that was."""
        pool = self.pools[name]
        if pool.steps is not None and pool.blocks:
            return pool
        like = next((each for each in self.pools.values() if each.steps is not None and each.blocks), None)
        if like is None:
            return pool
        return replace(like, name=name, role=pool.role, target=pool.target, ready=pool.ready, starting=pool.starting)


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total if total else 0.0 for name, weight in weights.items()}
