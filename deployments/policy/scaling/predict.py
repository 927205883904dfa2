"""What a load does to a number of equal replicas: the time to the first token with its wait, TPOT, memory. Pure.

The wait for a first token follows Erlang's C formula, for many equal servers and one queue. Prompts differ in length,
so a wait is longer by the mean residual of their times (Pollaczek and Khinchine), and classes of a lower rank go first
(Cobham).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deployments.messages import Role
from deployments.policy.scaling.inputs import NONE, Arrivals, PoolNow, Predicted
from deployments.policy.scaling.reasons import Reason
from deployments.policy.step_size import LEAST_SHARE, STEADY
from deployments.step_cost import Coefficients

MISSES = 0.01
"""The share of first tokens that may come later than predicted."""
MOST_BUSY = 0.95
"""The largest share of its time that a pool may compute prompts, however loose the objectives are."""
OVERLOADED = 100.0
"""The strain of a load that cannot be carried at all."""
TINY = 1e-9


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """The prompts of one class: its rank and objectives (infinite without), and what comes of it in a second."""

    name: str
    rank: int
    ttft_s: float
    tpot_s: float
    per_s: Arrivals


@dataclass(frozen=True, slots=True)
class Load:
    """What a pool is asked for. `burst`: how much more arrivals vary than independent ones, as a multiple.

    `answers` at once, the tokens that they hold halfway (`held`), and those that are `promised` to them at most, while
    a token takes `token_s`; 0: not known.
    `backlog`: prompts of earlier seconds that will be there when a start would be over, in replicas that they keep busy
    until the next one. `own_share`: the share of a step that prompts get beside answers without an objective.
    """

    classes: tuple[ClassLoad, ...] = ()
    answers: float = 0.0
    held: float = 0.0
    promised: float = 0.0
    backlog: float = 0.0
    burst: float = 1.0
    own_share: float = 0.75
    token_s: float = 0.0

    def part(self, prompts: float, answers: float) -> Load:
        """The load of one of several pools: its shares of the prompts and of the answers."""
        classes = tuple(replace(each, per_s=each.per_s.times(prompts)) for each in self.classes)
        mine = (self.answers * answers, self.held * answers, self.promised * answers)
        return Load(classes, *mine, self.backlog * prompts, self.burst, self.own_share, self.token_s)

    def grown(self, factor: float) -> Load:
        """The load where so many times as much comes."""
        return self.part(factor, factor)

    @property
    def tpot_s(self) -> float:
        """The least TPOT objective; infinite without any."""
        return min((each.tpot_s for each in self.classes), default=math.inf)


NOT_KNOWN = Predicted(strain=1.0, because="its speed is not known yet", code=Reason.SPEED_UNKNOWN)
"""Of a pool of which no step was seen."""


def prefill_s(steps: Coefficients, chunk_tokens: int, arrived: Arrivals) -> tuple[float, float]:
    """The mean seconds of one of these prompts on an engine without answers, and the mean of their squares."""
    count = arrived.requests
    if count <= 0.0:
        return 0.0, 0.0
    token_s, context_s = steps.prefill_token_s, steps.prefill_context_s
    base_s = steps.base_s * max(1.0, arrived.new / count / max(1, chunk_tokens))
    beside_s = (token_s * arrived.new + context_s * arrived.context) / count
    square = token_s**2 * arrived.new_2 + 2 * token_s * context_s * arrived.cross + context_s**2 * arrived.context_2
    return base_s + beside_s, base_s**2 + 2 * base_s * beside_s + square / count


def erlang_c(servers: int, load: float) -> float:
    """The share of arrivals that find all servers busy. `load`: of all, in servers. 1 where it is too much."""
    if load >= servers:
        return 1.0
    blocked = 1.0  # Erlang's B, by its recursion
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1.0 - load / servers * (1.0 - blocked))


def predict(pool: PoolNow, load: Load, replicas: int, headroom: float) -> Predicted:
    """What is expected of `replicas` replicas of this pool under a load. `headroom`: see `ScalingConfig`.

    A pool whose steps are not known yet spares no replica, and lacks one only where its memory or its places are short.
    """
    steps = pool.steps
    if not (load.answers or load.backlog or any(each.per_s.requests for each in load.classes)):
        return Predicted()
    if replicas <= 0:
        return Predicted(strain=OVERLOADED, because="it has load and no replica", code=Reason.WAKE)
    if steps is None:
        memory = NOT_KNOWN if pool.role is Role.PREFILL or not pool.blocks else _memory(pool, load, replicas, headroom)
        return max(memory, NOT_KNOWN, key=lambda each: each.strain)
    if (load := _settled(steps, load, replicas)).answers == math.inf:
        return Predicted(strain=OVERLOADED, because="its tokens would come ever more slowly", code=Reason.DECODE_TPOT)
    answers, held = load.answers / replicas, load.held / replicas
    decoding_s = steps.step_s(0, 0, answers, held)
    allowed_s = STEADY * load.tpot_s if load.tpot_s < math.inf else decoding_s / (1.0 - load.own_share)
    beside = 1.0 - min(decoding_s / allowed_s, 1.0 - LEAST_SHARE)  # of a step that has answers, for prompts
    share = 1.0 - min(1.0, answers) * (1.0 - beside)
    busy = _busy(pool, load) / replicas
    found = []
    if pool.role is not Role.DECODE:
        found.append(_first_tokens(pool, load, replicas, share, headroom))
    if pool.role is not Role.PREFILL:
        found += [_memory(pool, load, replicas, headroom), _tokens(load, busy * beside / share, decoding_s, headroom)]
    worst = max(found, key=lambda each: each.strain)
    fill, tpot_s, ttft_s = (max(getattr(each, name) for each in found) for name in ("fill", "tpot_s", "ttft_s"))
    return Predicted(fill, busy, tpot_s, ttft_s, min(worst.strain, OVERLOADED), worst.because, worst.code)


def _settled(steps: Coefficients, load: Load, replicas: int) -> Load:
    """The load once this size has shown: where tokens take longer, answers take longer, and there are more at once.

    With `a` answers a token takes `base + each * a / replicas`, and by Little's law `a` grows in proportion to that.
    """
    if not load.token_s or not load.answers:
        return load
    each_s = (steps.sequence_s + load.held / load.answers * steps.context_s) * load.answers / replicas
    if each_s >= load.token_s:
        return replace(load, answers=math.inf)
    return load.part(1.0, steps.base_s / (load.token_s - each_s))


def _busy(pool: PoolNow, load: Load) -> float:
    """The seconds of prompts in a second."""
    assert pool.steps is not None, "only a pool whose steps are known is predicted"
    times = [prefill_s(pool.steps, pool.chunk_tokens, each.per_s)[0] * each.per_s.requests for each in load.classes]
    return sum(times) + load.backlog


def _first_tokens(pool: PoolNow, load: Load, replicas: int, share: float, headroom: float) -> Predicted:
    """The prompts' side. `share`: of a step, for prompts."""
    busy = _busy(pool, load) / share
    strain, because = busy / replicas / MOST_BUSY, f"{busy / replicas:.0%} of its time goes to prompts"
    code = Reason.PREFILL_BUSY
    ttft_s, found_busy = 0.0, erlang_c(replicas, busy)
    assert pool.steps is not None, "see `_busy`"
    whole = NONE
    for each in load.classes:
        whole = whole.plus(each.per_s)
    mean_s, square = prefill_s(pool.steps, pool.chunk_tokens, whole)
    residual_s = (load.burst * mean_s + (square - mean_s**2) / max(mean_s, TINY)) / 2 / share
    for each in load.classes:
        if each.ttft_s == math.inf or not each.per_s.requests:
            continue
        own_s, own_square = prefill_s(pool.steps, pool.chunk_tokens, each.per_s)
        own_s = (own_s + math.sqrt(max(0.0, own_square - own_s**2))) / share
        before, upto = (_of_ranks(pool, load, each.rank, same) / share / replicas for same in (False, True))
        left = (1.0 - before) * (1.0 - upto)
        wait_s = residual_s / (replicas * left) * math.log(max(1.0, found_busy / MISSES)) if upto < 1.0 else math.inf
        allowed_s = headroom * each.ttft_s
        predicted_s = min(own_s, allowed_s / 2) + wait_s  # more replicas do not help a prompt that is long itself
        ttft_s = max(ttft_s, predicted_s)
        if predicted_s / allowed_s > strain:
            strain, code = predicted_s / allowed_s, Reason.PREFILL_TTFT
            because = f"first tokens of class {each.name} take up to {_time(predicted_s)} of {_time(each.ttft_s)}"
    return Predicted(ttft_s=min(ttft_s, 1e6), strain=strain, because=because, code=code)


def _of_ranks(pool: PoolNow, load: Load, rank: int, same: bool) -> float:
    """The seconds of prompts in a second that go before this rank, and with it where `same`."""
    classes = tuple(each for each in load.classes if each.rank < rank or (same and each.rank == rank))
    return _busy(pool, replace(load, classes=classes, backlog=load.backlog if same else 0.0))


def _memory(pool: PoolNow, load: Load, replicas: int, headroom: float) -> Predicted:
    tokens = max(1, pool.blocks * pool.block_size) * replicas
    blocks, places = load.promised / tokens, load.answers / max(1, pool.max_sessions * replicas)
    fill = max(blocks, places)
    what, code = "KV memory is promised", Reason.DECODE_MEMORY
    if blocks < places:
        what, code = "places are taken", Reason.DECODE_PLACES
    return Predicted(fill=fill, strain=fill / headroom, because=f"{fill:.0%} of its {what}", code=code)


def _tokens(load: Load, busy: float, decoding_s: float, headroom: float) -> Predicted:
    """The answers' side: steps that prompts make longer. `busy`: the share of a step with answers that prompts take.

    Where a replica has no answer for a part of its time, its prompts take more of that part, and less beside answers.
    """
    tpot_s = decoding_s / max(1.0 - busy, TINY)
    strain = busy / load.own_share if load.tpot_s == math.inf else tpot_s / (headroom * load.tpot_s)
    because = f"a token takes {_time(tpot_s)}"
    return Predicted(tpot_s=min(tpot_s, 1e6), strain=strain, because=because, code=Reason.DECODE_TPOT)


def _time(seconds: float) -> str:
    return "for ever" if seconds == math.inf else f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.0f} ms"
