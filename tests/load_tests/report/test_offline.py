"""The figures of the benchmark `offline`, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from load_tests.report.offline import Ran, figures, kind, medians, over, ratios, targets, unlike

RAN = Ran(
    seconds=20.0,
    times_s=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 20.0),
    busy_s=(15.0, 5.0),
    preemptions=3,
    steps=((100, 0), (50, 2), (0, 3), (0, 3), (10, 3)),
    answers=((1, 2), (3,)),
)


def test_what_a_run_was() -> None:
    found = figures(RAN)
    assert found["output_tokens_per_s"] == 0.9, "nine of ten tokens in ten seconds"
    assert found["whole"] == 0.5
    assert found["bubble_share"] == 0.5, "20 of 2 x 20 seconds"
    assert found["switches"] == 3
    assert found["mixed_share"] == pytest.approx(2 / 3, abs=1e-4)
    assert (found["preemptions"], found["steps"], found["seconds"]) == (3, 5, 20.0)


def test_tokens_count_in_the_order_of_time() -> None:
    assert figures(replace(RAN, times_s=RAN.times_s[::-1])) == figures(RAN)


def test_a_run_without_a_prompt_has_no_mixed_steps() -> None:
    assert figures(replace(RAN, steps=((0, 1),)))["mixed_share"] == 0.0


@pytest.mark.parametrize(("step", "what"), [((5, 0), "prefill"), ((0, 5), "decode"), ((5, 1), "mixed")])
def test_kinds_of_steps(step: tuple[int, int], what: str) -> None:
    assert kind(*step) == what


def row(*rounds: float) -> dict[str, object]:
    return medians([figures(RAN) | {"output_tokens_per_s": each} for each in rounds])


def test_figures_are_medians_of_the_rounds_and_ratios_of_each_round() -> None:
    rows = {"temporal": row(12.0, 20.0, 33.0), "default": row(10.0, 20.0, 30.0), "tuned": row(6.0, 10.0, 11.0)}
    assert rows["temporal"]["output_tokens_per_s"] == 20.0
    assert rows["temporal"]["rounds"] == [12.0, 20.0, 33.0]
    assert over(rows, "temporal", "default") == 1.1, "1.2, 1.0 and 1.1"
    assert ratios(rows, ["temporal"]) == {"temporal_over_default": 1.1, "temporal_over_tuned": 2.0}


def test_answers_are_compared_one_by_one() -> None:
    assert unlike([[1, 2], [3]], [(1, 2), (3,)]) == 0
    assert unlike([[1, 2], [4]], [(1, 2), (3,)]) == 1
    with pytest.raises(ValueError, match="argument 2"):
        unlike([[1]], [(1,), (3,)])


def test_targets_are_those_of_what_was_measured() -> None:
    of = {"1": {"ratios": {"auto_over_tuned": 0.97}}, "2": {"ratios": {"auto_over_tuned": 1.149}}}
    assert targets(of, "auto") == {"pp_1_at_least_0.97": True, "pp_2_at_least_1.15": False}
    assert targets({"1": of["1"]}, "auto") == {"pp_1_at_least_0.97": True}
