"""Which way of scheduling an engine uses: it measures each of a few in turn, and stays with the fastest. Pure.

The fastest way depends on the machine, the model and the lengths of prompts and answers, and no data sheet says it. So
an engine tries. What it does now is the *incumbent*; every now and then it tries a *challenger*, for about as long as
it takes to tell them apart, right behind a look at the incumbent. A challenger must be faster by a margin to
stay, and is the incumbent then. Challengers are the ways that differ from the incumbent in one thing: in phases or not,
or steps of another size. The more often no challenger is faster, the seldomer one is tried.

Throughput is compared only while requests wait: an engine that has all the requests there are is as fast as these come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deployments.step_cost import Coefficients

SMALLER, SIZES = 4, 3
"""The sizes of steps that are tried: the most that the configuration allows, a fourth of that, a fourth of that."""
LEAST_STEP_TOKENS = 64
"""Smaller steps are not tried."""


class Way(NamedTuple):
    """How an engine schedules. `phased`: in phases; else a step has prompts beside answers. `step_tokens`: at most."""

    phased: bool
    step_tokens: int


def ways(stages: int, step_tokens: int, seats: int) -> tuple[Way, ...]:
    """What an engine tries; it begins with the first. `step_tokens`: the most of a step. `seats`: requests at once.

    A pipeline begins in phases, and one stage without. Smaller steps have a place for every answer.
    """
    least = max(LEAST_STEP_TOKENS, seats)
    smaller = {max(step_tokens // SMALLER**power, least) for power in range(1, SIZES)}
    sizes = (step_tokens, *sorted((size for size in smaller if size < step_tokens), reverse=True))
    kinds = (True, False) if stages > 1 else (False, True)
    return tuple(Way(phased, size) for size in sizes for phased in kinds)


class Prices(NamedTuple):
    """What a token is worth, in any unit. A prompt's counts once, however often it is computed."""

    prompt: float
    answer: float


def prices(steps: Coefficients, step_tokens: int, batch: float, context: float) -> Prices:
    """About the seconds that a token costs. So a time with more prompts than usual seems no slower than another.

    `step_tokens`: of a step of prompts. `batch`: answers in a step. `context`: the tokens that each of these holds.
    """
    if batch <= 0 or not any(steps):
        return Prices(1.0, 1.0)
    return Prices(
        steps.base_s / step_tokens + steps.prefill_token_s, steps.step_s(0, 0, batch, batch * context) / batch
    )


@dataclass(frozen=True, slots=True)
class Done:
    """What an engine has done since the last look.

    `prompt_tokens`: of requests that got their first token; `begun`: so many. `answer_tokens`: that came. `live`:
    requests that run now. `is_full`: more requests wait. `cycles`: prefill phases that have begun since the engine's
    start.
    """

    seconds: float
    prompt_tokens: int
    answer_tokens: int
    is_full: bool
    cycles: int = 0
    begun: int = 0
    live: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """`least_s`: seconds for which a way is measured at least. `turnover`: and until so many requests have begun, as a
    share of those that run: in a shorter time an engine may live on prompts that were computed before. In phases it
    goes on until a prefill phase begins. `most_s`: seconds after which a measurement is over in any case.
    `settle_share`: the share of `least_s` that is left out after a change. `margin`: a challenger must be faster by
    this share. `least_rest`, `most_rest`: how many looks at the incumbent come between two rounds of challengers; it
    doubles when none of them was faster."""

    least_s: float = 6.0
    turnover: float = 0.5
    most_s: float = 120.0
    settle_share: float = 0.25
    margin: float = 0.03
    least_rest: int = 16
    most_rest: int = 256


@dataclass(slots=True)
class _Look:
    """A measurement under way. `cycles`: prefill phases until the last time. `settled`: whether it counts by now."""

    cycles: int
    settled: bool = False
    skipped_s: float = 0.0
    seconds: float = 0.0
    worth: float = 0.0
    begun: int = 0

    @property
    def rate(self) -> float:
        return self.worth / self.seconds


class Choosing:
    """Chooses for one engine. `among`: the ways; the first is the incumbent at the beginning."""

    def __init__(self, among: Sequence[Way], rule: ChoiceRule | None = None) -> None:
        self._ways, self._rule = tuple(among), rule or ChoiceRule()
        self._incumbent = self._trying = self._ways[0]
        self._untried = self._challengers()
        self._won, self._rest, self._rested = False, 0, 0
        self._prices, self._rate = Prices(1.0, 1.0), 0.0
        self._look: _Look | None = None

    @property
    def way(self) -> Way:
        """How the engine is to schedule now."""
        return self._trying

    @property
    def incumbent(self) -> Way:
        """The fastest way, as far as is known."""
        return self._incumbent

    def observe(self, done: Done, prices: Prices) -> Way:
        """What the engine has done in the way that was the answer to the last call. Returns the way from now on.

        `prices`: those of now. A challenger and its incumbent are measured at the same ones.
        """
        if len(self._ways) == 1:
            return self.way
        if not done.is_full:
            self._give_up()
        elif self._look is None:  # the time before was not full, or of another way
            self._look = _Look(done.cycles)
        elif not self._look.settled:
            if self._trying == self._incumbent:
                self._prices = prices
            self._settle(self._look, done)
        elif self._is_over(self._look, done):
            self._ended(self._look)
        return self.way

    def _give_up(self) -> None:
        """Nothing waits: what is under way is no measurement. A challenger has its turn later."""
        if self._trying != self._incumbent:
            self._untried.insert(0, self._trying)
        self._turn_to(self._incumbent)

    def _settle(self, look: _Look, done: Done) -> None:
        """In phases a measurement begins with a prefill phase."""
        look.skipped_s += done.seconds
        has_settled = look.skipped_s >= self._rule.settle_share * self._rule.least_s
        look.settled = (has_settled and self._begins(look, done)) or look.skipped_s >= self._rule.most_s
        look.cycles = done.cycles

    def _is_over(self, look: _Look, done: Done) -> bool:
        """Take a time into a measurement, and say whether it is complete. In phases it has whole cycles."""
        look.seconds += done.seconds
        look.worth += done.prompt_tokens * self._prices.prompt + done.answer_tokens * self._prices.answer
        look.begun += done.begun
        begins, look.cycles = self._begins(look, done), done.cycles
        is_enough = look.seconds >= self._rule.least_s and look.begun >= self._rule.turnover * done.live
        return (begins and is_enough) or look.seconds >= self._rule.most_s

    def _begins(self, look: _Look, done: Done) -> bool:
        return not self.way.phased or done.cycles != look.cycles

    def _ended(self, look: _Look) -> None:
        if self._trying == self._incumbent:
            self._rate = look.rate
            self._rested += 1
            self._turn_to(self._due())
        elif look.rate > self._rate * (1.0 + self._rule.margin):
            beaten, self._incumbent = self._incumbent, self._trying
            self._rate, self._won = look.rate, True
            self._untried = [way for way in self._challengers() if way != beaten]
            self._after_a_trial()
            self._turn_to(self._due())
        else:
            self._after_a_trial()
            self._turn_to(self._incumbent)

    def _after_a_trial(self) -> None:
        if not self._untried:
            rule = self._rule
            self._rest = min(2 * self._rest, rule.most_rest) if self._rest and not self._won else rule.least_rest
            self._won, self._rested = False, 0

    def _due(self) -> Way:
        """What is measured next, behind a look at the incumbent."""
        if not self._untried and self._rested >= self._rest:
            self._untried = self._challengers()
        return self._untried.pop(0) if self._untried else self._incumbent

    def _challengers(self) -> list[Way]:
        """What differs from the incumbent in one thing: the other kind, smaller steps, larger steps; the nearest first.

        All sizes are among them: two are the same way where no step is as large as the smaller one.
        """
        phased, tokens = self._incumbent
        unlike = [way for way in self._ways if (way.phased == phased) != (way.step_tokens == tokens)]
        return sorted(
            unlike, key=lambda way: (way.step_tokens != tokens, way.step_tokens > tokens, abs(way.step_tokens - tokens))
        )

    def _turn_to(self, way: Way) -> None:
        self._trying, self._look = way, None
