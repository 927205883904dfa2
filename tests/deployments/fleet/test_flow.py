"""What was placed on a replica lately: sums in which older placements fade."""

from __future__ import annotations

import math

import pytest

from deployments.fleet.flow import WINDOW_S, Flow


def test_a_prompt_counts_for_a_third_after_the_window() -> None:
    flow = Flow()
    flow.prompt(2.0, 100.0)
    assert (flow.prompts, flow.seconds, flow.at_s) == (1.0, 2.0, 100.0)
    flow.prompt(4.0, 100.0 + WINDOW_S)
    assert flow.prompts == pytest.approx(1.0 + 1.0 / math.e)
    assert flow.seconds == pytest.approx(4.0 + 2.0 / math.e)


def test_a_steady_flow_sums_up_to_its_rate_times_the_window() -> None:
    flow = Flow()
    for number in range(1000):
        flow.prompt(0.1, number / 5)
    assert flow.prompts / WINDOW_S == pytest.approx(5.0, rel=0.02)
    assert flow.seconds / WINDOW_S == pytest.approx(0.5, rel=0.02)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    flow = Flow()
    flow.prompt(1.0, 5.0)
    flow.prompt(1.0, 4.0)
    assert (flow.prompts, flow.at_s) == (2.0, 5.0)


def test_moves_fade_like_prompts() -> None:
    flow = Flow()
    flow.move(80.0, 100.0)
    flow.prompt(2.0, 100.0 + WINDOW_S)
    assert flow.prompts == 1.0
    assert flow.moves == pytest.approx(1.0 / math.e)
    assert flow.bytes == pytest.approx(80.0 / math.e)
