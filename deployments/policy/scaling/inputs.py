"""What the planner reads and what it answers: plain data. Times are seconds, lengths tokens, memory KV blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deployments.messages import Role
from deployments.policy.scaling.reasons import Reason
from deployments.step_cost import Coefficients


class Arrivals(NamedTuple):
    """Sums over the requests that have come, those that were refused included.

    `new`: prompt tokens that no cache has. `context`: the sum, over those tokens, of the tokens before each. `new_2`,
    `cross`, `context_2`: their squares and product, from which the spread of prefill times follows for any engine.
    `held`: prompt plus longest answer. `output`: the expected answer, 0 where
    it is not known.
    """

    requests: float = 0.0
    new: float = 0.0
    context: float = 0.0
    new_2: float = 0.0
    cross: float = 0.0
    context_2: float = 0.0
    held: float = 0.0
    output: float = 0.0

    def plus(self, other: Arrivals, times: float = 1.0) -> Arrivals:
        """The sums of both, of the other one `times`."""
        return Arrivals(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, factor: float) -> Arrivals:
        """Every sum multiplied."""
        return Arrivals(*(factor * each for each in self))


NONE = Arrivals()


@dataclass(frozen=True, slots=True)
class Waiting:
    """The requests that wait to be placed, by what they wait for.

    `prefill`: a turn on prefill: a decode replica has room for them now. `memory`: KV blocks of a decode replica.
    `place`: every decode replica runs its most sessions. `prefill_tokens`: the prompts of the first kind.
    `decode_tokens`: prompt plus longest answer of the other two.
    """

    prefill: int = 0
    memory: int = 0
    place: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def decode(self) -> int:
        """The number that waits for decode."""
        return self.memory + self.place


@dataclass(frozen=True, slots=True)
class PoolNow:
    """One pool at one moment.

    `target`: the replicas that were asked for last. `ready`: those that take requests. `starting`: the age in seconds
    of each start in flight. `steps`: what a step takes; None while no replica has told. `blocks`, `block_size`,
    `max_sessions`, `chunk_tokens`: of one replica; 0 while not known.

    The rest are sums over the ready replicas: `sessions` with a part there; `answers` that are written, or will be as
    soon as their KV comes; blocks that are `promised` (prompt plus longest answer); tokens that the answers are
    expected to hold halfway (`held`); `backlog_s` of prompts; and the prefill seconds that were placed there per second
    lately (`prefill_load`).
    """

    name: str
    role: Role
    target: int
    ready: int = 0
    starting: tuple[float, ...] = ()
    steps: Coefficients | None = None
    blocks: int = 0
    block_size: int = 1
    max_sessions: int = 0
    chunk_tokens: int = 0
    sessions: float = 0.0
    answers: float = 0.0
    promised: float = 0.0
    held: float = 0.0
    backlog_s: float = 0.0
    prefill_load: float = 0.0


@dataclass(frozen=True, slots=True)
class Now:
    """Everything that the planner reads. `arrived`: by class, all that have come since the manager began."""

    at_s: float
    pools: tuple[PoolNow, ...]
    arrived: Mapping[str, Arrivals] = field(default_factory=dict)
    waiting: Waiting = Waiting()


@dataclass(frozen=True, slots=True)
class Predicted:
    """What is expected of a pool at its planned size, at the load that the plan is made for.

    `fill`: the share of its KV blocks that is promised, or of its places, where that is more. `busy`: the share of its
    time that it computes prompts. `tpot_s`: of its answers. `ttft_s`: 99 of 100 first tokens come within it, the wait
    included, in the class that is the nearest to its objective. `strain`: the largest of these as a multiple of what it
    may be; over 1 the pool is short. `because`: the words for that one. `code`: its code.
    """

    fill: float = 0.0
    busy: float = 0.0
    tpot_s: float = 0.0
    ttft_s: float = 0.0
    strain: float = 0.0
    because: str = "no load"
    code: Reason = Reason.NO_LOAD


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes that the pools should have, each with its reason. `dataclasses.asdict` of it is JSON.

    `targets`: replicas by pool, of every pool, also of those that stay as they are. `reasons`: a sentence for each.
    `short`: the pool that lacks most, or None. `predicted`: by pool. `start_s`: how long a start of each pool takes, as
    far as it was measured. `growth`: the load that is expected when a start would be over, as a multiple of today's.
    `cost_per_hour`: of all targets. `dry_run`: nothing is to be changed. `codes`: the code of each reason.
    """

    at_s: float
    targets: dict[str, int]
    reasons: dict[str, str]
    short: str | None = None
    predicted: dict[str, Predicted] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    growth: float = 1.0
    cost_per_hour: float = 0.0
    dry_run: bool = False
    codes: dict[str, Reason] = field(default_factory=dict)
