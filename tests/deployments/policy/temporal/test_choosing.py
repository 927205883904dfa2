"""An engine that tries ways of scheduling stays with the fastest, and seldom does another one."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.policy.temporal.choosing import (
    ChoiceRule,
    Choosing,
    Done,
    Prices,
    Way,
    prices,
    ways,
)
from deployments.step_cost import Coefficients

RULE = ChoiceRule()
PRICES = Prices(0.001, 0.004)
STEP_S, CYCLE_STEPS = 0.1, 40
Rates = Callable[[Way, float], float]


class Engine:
    """It does `rate(way, now_s)` tokens of answers a second, and as many of prompts. In phases it does all prompts of a
    cycle in its first half."""

    def __init__(self, choosing: Choosing, rate: Rates) -> None:
        self.choosing, self._rate = choosing, rate
        self.now_s, self._steps, self._cycles = 0.0, 0, 0
        self.spent_s: defaultdict[Way, float] = defaultdict(float)
        self.changes: list[tuple[float, Way]] = []

    def run(self, seconds: float, is_full: bool = True) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self._step(is_full)

    def _step(self, is_full: bool) -> None:
        way, tokens = self.choosing.way, self._rate(self.choosing.way, self.now_s) * STEP_S
        self.now_s += STEP_S
        self.spent_s[way] += STEP_S
        prompts = answers = tokens
        if way.phased:
            self._steps += 1
            self._cycles = self._steps // CYCLE_STEPS
            is_first = self._steps % CYCLE_STEPS < CYCLE_STEPS / 2
            prompts, answers = (2 * tokens, 0) if is_first else (0, 2 * tokens)
        done = Done(STEP_S, round(100 * prompts), round(100 * answers), is_full, self._cycles)
        if self.choosing.observe(done, PRICES) != way:
            self.changes.append((self.now_s, self.choosing.way))


def engine(rates: dict[Way, float], among: Sequence[Way], rule: ChoiceRule = RULE, noise: float = 0.0) -> Engine:
    rng = random.Random(1)
    return Engine(Choosing(among, rule), lambda way, _: rates[way] * (1 + rng.uniform(-noise, noise)))


AMONG = ways(2, 2048, 64)
PHASED, PLAIN, PHASED_512, PLAIN_512, PHASED_128, PLAIN_128 = AMONG


def test_a_pipeline_begins_in_phases_and_one_stage_without() -> None:
    assert [way.phased for way in AMONG] == [True, False] * 3
    assert [way.step_tokens for way in AMONG[::2]] == [2048, 512, 128]
    assert ways(1, 2048, 64)[0] == PLAIN
    assert set(ways(1, 2048, 64)) == set(AMONG)


@pytest.mark.parametrize(
    ("tokens", "seats", "sizes"),
    [(2048, 1024, {2048, 1024}), (8192, 256, {8192, 2048, 512}), (128, 16, {128, 64}), (64, 16, {64})],
)
def test_smaller_steps_have_a_place_for_every_answer(tokens: int, seats: int, sizes: set[int]) -> None:
    assert {way.step_tokens for way in ways(1, tokens, seats)} == sizes


def rate(way: Way, fastest: Way) -> float:
    """The more a way differs from the fastest, the slower it is."""
    sizes = sorted({each.step_tokens for each in AMONG})
    steps = abs(sizes.index(way.step_tokens) - sizes.index(fastest.step_tokens))
    return 100.0 - 10.0 * steps - 15.0 * (way.phased != fastest.phased)


@pytest.mark.parametrize("fastest", AMONG)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_fastest_is_found_and_kept(fastest: Way, noise: float) -> None:
    made = engine({way: rate(way, fastest) for way in AMONG}, AMONG, noise=noise)
    made.run(200)
    assert made.choosing.incumbent == fastest
    before = made.spent_s.copy()
    made.run(3600)
    spent = {way: made.spent_s[way] - before[way] for way in AMONG}
    assert spent[fastest] > 0.9 * 3600


def test_sizes_that_make_no_difference_hide_no_faster_one() -> None:
    """As where no step ever has more than 512 tokens."""
    made = engine({way: 100.0 - 20.0 * way.phased for way in AMONG} | {PLAIN_128: 120.0}, AMONG)
    made.run(200)
    assert made.choosing.incumbent == PLAIN_128


def test_what_is_hardly_faster_changes_nothing() -> None:
    made = engine(dict(zip(AMONG, (100.0, 102.0, 101.0, 100.0, 102.0, 101.0), strict=True)), AMONG)
    made.run(3600)
    assert made.choosing.incumbent == PHASED


def test_challengers_are_tried_more_and_more_seldom() -> None:
    made = engine(dict.fromkeys(AMONG, 100.0), AMONG)
    made.run(40_000)
    trials = [at_s for at_s, way in made.changes if way == PLAIN]
    gaps = [after - before for before, after in pairwise(trials)]
    assert len(gaps) >= 3
    assert gaps[:3] == sorted(gaps[:3])
    assert gaps[1] > 1.5 * gaps[0]
    assert gaps[-1] < 3 * RULE.most_rest * RULE.least_s


def test_what_becomes_faster_later_is_found() -> None:
    """As where the requests are of another kind by then."""
    choosing = Choosing((PHASED, PLAIN))
    made = Engine(choosing, lambda way, now_s: 120.0 if way.phased == (now_s < 5000) else 100.0)
    made.run(5000)
    assert choosing.incumbent == PHASED
    made.run(2 * RULE.most_rest * RULE.least_s)
    assert choosing.incumbent == PLAIN


def test_phases_are_measured_in_whole_cycles() -> None:
    """Half a cycle has all its prompts or all its answers, and these have other prices."""
    made = engine({PHASED: 100.0, PLAIN: 104.5}, (PLAIN, PHASED))
    made.run(3600)
    assert made.choosing.incumbent == PLAIN
    slower = engine({PHASED: 100.0, PLAIN: 95.0}, (PLAIN, PHASED))
    slower.run(600)
    assert slower.choosing.incumbent == PHASED


def test_nothing_is_measured_while_nothing_waits() -> None:
    made = engine({PHASED: 1.0, PLAIN: 100.0}, (PHASED, PLAIN))
    made.run(3600, is_full=False)
    assert made.changes == []
    made.run(600)
    assert made.choosing.incumbent == PLAIN


def test_a_challenger_gives_way_when_nothing_waits_and_has_its_turn_later() -> None:
    made = engine({PHASED: 100.0, PLAIN: 200.0}, (PHASED, PLAIN))
    while made.choosing.way == PHASED:
        made.run(STEP_S)
    made.run(1.0, is_full=False)
    assert made.choosing.way == PHASED
    assert made.choosing.incumbent == PHASED, "half a look says nothing"
    made.run(120)
    assert made.choosing.incumbent == PLAIN


def test_phases_that_never_end_are_no_trap() -> None:
    choosing, steps = Choosing((PHASED, PLAIN)), round(3 * RULE.most_s / STEP_S)
    seen = {choosing.observe(Done(STEP_S, 0, 10, True, 0), PRICES) for _ in range(steps)}
    assert seen == {PHASED, PLAIN}


@pytest.mark.parametrize(("begun", "seconds"), [(1, 20.0), (10, RULE.least_s), (0, RULE.most_s)])
def test_a_look_is_over_when_many_of_the_requests_are_new(begun: int, seconds: float) -> None:
    """Of 40 that run, 20 have to begin: one a second, or ten, or none."""
    choosing, looks_s = Choosing((PLAIN, PHASED)), 0.0
    while choosing.way == PLAIN:
        choosing.observe(Done(1.0, 100, 100, True, begun=begun, live=40), PRICES)
        looks_s += 1.0
    assert looks_s == pytest.approx(seconds + 1.0 + math.ceil(RULE.settle_share * RULE.least_s))


def test_one_way_alone_is_never_left() -> None:
    made = engine({PLAIN: 1.0}, (PLAIN,))
    made.run(100)
    assert made.changes == []


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(50.0, 150.0), min_size=6, max_size=6),
    st.lists(st.tuples(st.floats(0.1, 400.0), st.booleans()), min_size=1, max_size=12),
)
def test_in_the_end_nothing_that_differs_in_one_thing_is_faster(
    rates: list[float], times: list[tuple[float, bool]]
) -> None:
    made = engine(dict(zip(AMONG, rates, strict=True)), AMONG)
    for seconds, is_full in times:
        made.run(seconds, is_full)
        assert made.choosing.way in AMONG
    made.run(RULE.most_rest * RULE.least_s * 3)
    rate_of, found = dict(zip(AMONG, rates, strict=True)), made.choosing.incumbent
    near = [way for way in AMONG if (way.phased == found.phased) != (way.step_tokens == found.step_tokens)]
    assert max(rate_of[way] for way in near) <= rate_of[found] * (1 + RULE.margin) * 1.02


def test_a_token_costs_what_steps_take() -> None:
    steps = Coefficients(0.1, 0.001, 0.0, 0.002, 1e-6)
    found = prices(steps, 100, 10, 1000)
    assert found.prompt == pytest.approx(0.002)
    assert found.answer == pytest.approx((0.1 + 0.02 + 0.01) / 10)
    assert prices(Coefficients(0, 0, 0, 0, 0), 100, 10, 1000) == Prices(1.0, 1.0)
    assert prices(steps, 100, 0, 0) == Prices(1.0, 1.0)
