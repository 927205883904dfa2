"""When decode gives way to prefill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.temporal.intensity import DecodeRate, SwitchRule, prefill_phase, spatial, temporal
from deployments.step_cost import Coefficients

STEPS = Coefficients(0.05, 0.0002, 0.0, 0.0002, 1e-8)
STAGES = 4


def test_a_full_batch_has_all_of_the_peak_and_half_a_batch_less() -> None:
    assert spatial(STEPS, 64, 64, 500) == 1.0
    assert spatial(STEPS, 80, 64, 500) == 1.0, "more than was thought possible is the new peak"
    assert 0.5 < spatial(STEPS, 32, 64, 500) < 0.65, "a step of half the batch is hardly shorter"


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_larger_batch_is_never_less_intense(one: int, other: int) -> None:
    smaller, larger = sorted((one, other))
    assert spatial(STEPS, smaller, 200, 100) <= spatial(STEPS, larger, 200, 100) + 1e-12


def test_the_phase_is_its_steps() -> None:
    phase = prefill_phase(STEPS, [1000, 3000], step_tokens=2000, is_all=False)
    assert (phase.requests, phase.tokens) == (2, 4000)
    assert phase.seconds == pytest.approx(2 * 0.05 + 4000 * 0.0002)
    assert phase.longest_s == pytest.approx(0.05 + 2000 * 0.0002)


def test_a_pipeline_of_one_stage_has_no_bubbles() -> None:
    assert temporal(prefill_phase(STEPS, [4000], 2000, False), 0.05, stages=1) == 1.0


def test_the_longer_the_phase_the_less_the_bubble_is_of_it() -> None:
    shares = [temporal(prefill_phase(STEPS, [2000] * count, 2000, False), 0.06, STAGES) for count in (1, 4, 40)]
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] > 0.9


def test_a_prefill_step_as_short_as_a_decode_step_leaves_no_bubble() -> None:
    assert temporal(prefill_phase(STEPS, [10], 2000, True), decode_s=0.06, stages=STAGES) == 1.0


RULE = SwitchRule(margin=0.05)


def goes_back(intensity: float, prompts: list[int], is_all: bool = False) -> tuple[bool, str]:
    least = RULE.least_tokens(step_tokens=2000, memory_tokens=100_000)
    return RULE.goes_back(intensity, prefill_phase(STEPS, prompts, 2000, is_all), 0.06, STAGES, least)


def test_the_least_phase_is_a_part_of_memory_where_that_is_small() -> None:
    assert RULE.least_tokens(2000, 100_000) == 4000
    assert RULE.least_tokens(2000, 8000) == 1000


def test_decode_goes_on_where_nothing_that_waits_fits() -> None:
    assert goes_back(0.0, []) == (False, "nothing that waits fits")


def test_a_small_phase_waits_until_more_of_what_waits_fits() -> None:
    assert goes_back(0.1, [3000]) == (False, "the prefill phase would be too small")
    assert goes_back(0.1, [3000], is_all=True)[0], "nothing else waits: it will not become larger"


def test_decode_gives_way_where_it_is_further_below_its_peak_than_the_switch_costs() -> None:
    assert goes_back(0.5, [2000] * 40)[0]
    assert not goes_back(0.97, [2000] * 40)[0]
    assert not goes_back(0.5, [2000] * 2, is_all=True)[0], "the bubble takes more than half of so short a phase"


def test_equal_intensities_do_not_switch() -> None:
    share = temporal(prefill_phase(STEPS, [2000] * 40, 2000, False), 0.06, STAGES)
    assert not goes_back(share, [2000] * 40)[0]
    assert not goes_back(share - 0.04, [2000] * 40)[0]
    assert goes_back(share - 0.06, [2000] * 40)[0]


def test_the_rate_that_is_left_is_of_the_last_steps_over_the_first_ones() -> None:
    rate = DecodeRate(2)
    rate.observe(8, 0.1)
    assert rate.left == 1.0, "too few steps"
    rate.observe(8, 0.3)
    assert rate.left == 1.0
    rate.observe(2, 0.1)
    rate.observe(2, 0.1)
    assert rate.left == pytest.approx(20 / 40)
    rate.observe(99, 0.1)
    rate.observe(99, 0.1)
    assert rate.left == 1.0, "at most"
    rate.begin()
    assert rate.left == 1.0
