"""The simulator's side of the comparison with the real cluster."""

from __future__ import annotations

import pytest

from load_tests.bench.simulator import ANSWERS, PROMPTS, Seen, compare, simulate
from load_tests.simulator.profiles import CPU_STEPS
from load_tests.simulator.synthetic import poisson

LEARNED = {"prefill": CPU_STEPS, "decode-main": CPU_STEPS}


@pytest.mark.parametrize(
    ("split", "modes"), [("always", {"disaggregated"}), ("auto", {"disaggregated", "decode_local"})]
)
def test_every_request_is_served_in_a_way_that_the_setting_allows(split: str, modes: set[str]) -> None:
    trace = poisson(1.0, 60, 1, PROMPTS, ANSWERS)
    answers, served = simulate(trace, LEARNED, 0.04, split, seed=1)
    assert len(answers) == served.total() == 60
    assert set(served) == modes
    assert all(each.ttft_s > 0.04 / 2 for each in answers)


def test_a_ratio_that_is_farther_off_than_its_target_is_not_met() -> None:
    figures = compare([Seen(1.0, 0.1)] * 9, [Seen(1.1, 0.2)] * 9)
    assert figures["ttft_s_p50"]["met"]
    assert not figures["tpot_s_p50"]["met"]
    assert figures["tpot_s_p90"]["ratio"] == 2.0
