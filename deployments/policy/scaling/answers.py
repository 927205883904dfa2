"""How many answers there are at once, and the memory promised to them: seen, and expected of the arrivals. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from deployments.messages import Role
from deployments.policy.scaling.inputs import Arrivals, Now, PoolNow, Waiting

LOOKS = 12
"""What is seen is the mean of so many looks: the number of answers goes up and down by chance."""
SLOWLY = 0.05
"""The weight of a new look in the ratio between seen and expected."""
LEAST_RATIO, MOST_RATIO = 0.3, 1.5
FEWEST = 5.0
"""Fewer answers than this say nothing of the ratio."""


class Answers(NamedTuple):
    """Answers at once, the tokens that they hold halfway, and those that they are promised at most."""

    answers: float = 0.0
    held: float = 0.0
    promised: float = 0.0

    def times(self, factor: float) -> Answers:
        """All three multiplied."""
        return Answers(*(factor * each for each in self))


class AnswersNow:
    """What is seen, or what is to be expected of the arrivals by Little's law, where that is clearly more.

    The second is early: a replica that has many new answers has their tokens later. It is as good as the predicted
    lengths, so its usual ratio to what is seen corrects it, while no request waits for memory.
    """

    def __init__(self) -> None:
        self._seen: deque[Answers] = deque(maxlen=LOOKS)
        self._tokens_s: deque[float] = deque(maxlen=LOOKS)
        self._ratio = 1.0

    @property
    def token_s(self) -> float:
        """How long a token took in those looks."""
        return sum(self._tokens_s) / max(1, len(self._tokens_s))

    def look(self, now: Now, per_s: Mapping[str, Arrivals], prefill_s: float, chance: float) -> Answers:
        """The answers of now.

        `per_s`: what comes in a second, by class. `prefill_s`: mean seconds of a prompt. `chance`: see `History`.
        """
        here = _seen(now)
        self._seen.append(here)
        self._tokens_s.append(_token_s(now.pools))
        seen = Answers(*(sum(each) / len(self._seen) for each in zip(*self._seen, strict=True)))
        seen = _with_waiting(seen, now.waiting)
        expected = _expected(self.token_s, per_s, prefill_s, here)
        if not now.waiting.decode and min(seen.answers, expected.answers) >= FEWEST:
            ratio = min(max(seen.promised / max(expected.promised, 1.0), LEAST_RATIO), MOST_RATIO)
            self._ratio += SLOWLY * (ratio - self._ratio)
        corrected = expected.times(self._ratio)
        return corrected if corrected.promised > chance * seen.promised else seen


def _seen(now: Now) -> Answers:
    """What is on the replicas. An answer on a prefill replica is promised as much as one elsewhere. Where none is
    elsewhere, its pool's sessions are equal: prompts take memory there as well."""
    writing = [pool for pool in now.pools if pool.role is not Role.PREFILL]
    there = sum(pool.answers for pool in writing)
    seen = Answers(there, sum(pool.held for pool in writing), sum(pool.promised * pool.block_size for pool in writing))
    if there >= 1.0:
        return seen.times(sum(pool.answers for pool in now.pools) / there)
    for pool in now.pools:
        if pool.role is Role.PREFILL and pool.answers:
            part = pool.answers / max(pool.sessions, pool.answers)
            more = (pool.answers, part * pool.held, part * pool.promised * pool.block_size)
            seen = Answers(*(mine + theirs for mine, theirs in zip(seen, more, strict=True)))
    return seen


def _with_waiting(seen: Answers, waiting: Waiting) -> Answers:
    """With what waits for memory or a place now."""
    share = seen.held / seen.promised if seen.promised else 0.5
    tokens = waiting.decode_tokens
    return Answers(seen.answers + waiting.decode, seen.held + share * tokens, seen.promised + tokens)


def _expected(token_s: float, per_s: Mapping[str, Arrivals], prefill_s: float, seen: Answers) -> Answers:
    answers = promised = held = 0.0
    for each in per_s.values():
        here = each.output * token_s + each.requests * prefill_s
        answers += here
        promised += here * each.held / each.requests
        held += here * (each.new + each.output / 2) / each.requests
    if seen.answers:
        held = max(held, answers * seen.held / seen.answers)
    return Answers(answers, held, promised)


def _token_s(pools: tuple[PoolNow, ...]) -> float:
    """The mean seconds of a token on the replicas that write answers."""
    total = weight = 0.0
    for pool in pools:
        if pool.role is Role.PREFILL or pool.steps is None:
            continue
        replicas = max(1, pool.ready)
        answers = max(pool.answers, 1.0)
        total += answers * pool.steps.step_s(0, 0, answers / replicas, pool.held / replicas)
        weight += answers
    return total / weight if weight else 0.0
