"""Figures of runs whose arrivals were written by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from load_tests.report import plots
from load_tests.report.serving import (
    Objective,
    by_kind,
    e2e_s,
    figures,
    gaps_s,
    max_gap_s,
    over_rounds,
    percentiles,
    tokens_per_s,
    tpot_s,
    ttft_s,
)
from load_tests.report.serving_rounds import mixed_row, objectives_for
from load_tests.traffic.client import Answer


def answer(due_s: float, *times: float, kind: str = "short", error: str = "") -> Answer:
    return Answer(kind, due_s, len(times), due_s + 0.01, [(at_s, 1) for at_s in times], error)


def test_of_one_answer() -> None:
    one = answer(1.0, 1.5, 1.6, 2.0)
    assert ttft_s(one) == pytest.approx(0.5)
    assert e2e_s(one) == pytest.approx(1.0)
    assert tpot_s(one) == pytest.approx(0.25)
    assert gaps_s(one) == pytest.approx([0.1, 0.4])
    assert max_gap_s(one) == pytest.approx(0.4)


def test_tokens_of_one_event_arrive_together() -> None:
    one = Answer("short", 0.0, 5, 0.0, [(1.0, 2), (2.0, 3)])
    assert gaps_s(one) == pytest.approx([0.0, 1.0, 0.0, 0.0])
    assert tpot_s(one) == pytest.approx(0.25)


def test_one_token_has_no_gap() -> None:
    one = answer(0.0, 1.0)
    assert (gaps_s(one), max_gap_s(one), tpot_s(one)) == ([], 0.0, 0.0)


def test_goodput_is_what_met_both_objectives_of_its_kind() -> None:
    objectives = {"short": Objective(0.5, 0.1), "long": Objective(2.0, 0.1)}
    answers = [
        answer(0.0, 0.4, 0.45),
        answer(0.0, 0.6, 0.7),  # first token too late
        answer(0.0, 0.4, 0.6),  # too slow
        answer(0.0, 1.9, 1.95, kind="long"),
        answer(0.0, 0.1, 0.2, error="cut off"),
    ]
    found = figures(answers, 0.0, 4.0, objectives)
    assert (found["goodput_rps"], found["requests"], found["failed"]) == (0.5, 5, 1)
    assert found["first_error"] == "cut off"
    assert figures(by_kind(answers)["long"], 0.0, 4.0, objectives)["goodput_rps"] == 0.25


def test_a_slower_machine_has_longer_objectives() -> None:
    answers = [answer(0.0, 0.9, 0.99), answer(0.0, 1.1, 1.12), answer(0.0, 7.9, 7.95, kind="long")]
    assert mixed_row(answers, 1.0)["goodput_rps"] == 0
    assert mixed_row(answers, 1.0, objectives_for(2.0))["goodput_rps"] == 2


def test_only_requests_due_in_the_window_count_and_only_tokens_that_arrived_in_it() -> None:
    answers = [answer(0.5, 1.5, 2.5), answer(2.0, 2.5, 9.0), answer(5.0, 5.5)]
    found = figures(answers, 1.0, 5.0)
    assert found["requests"] == 1
    assert found["ttft_p50_s"] == pytest.approx(0.5)
    assert found["e2e_mean_s"] == pytest.approx(7.0)
    assert found["output_tokens_per_s"] == pytest.approx(3 / 4)
    assert tokens_per_s(answers, 0.0, 10.0) == pytest.approx(0.5)


def test_without_requests_figures_are_none() -> None:
    found = figures([], 0.0, 1.0)
    assert (found["ttft_p99_s"], found["e2e_mean_s"], found["output_tokens_per_s"]) == (None, None, 0.0)


def test_lateness_is_the_clients() -> None:
    assert figures([answer(0.0, 1.0)], 0.0, 1.0)["late_p99_s"] == pytest.approx(0.01)


def test_percentiles_have_their_names() -> None:
    values = [float(value) for value in range(101)]
    assert percentiles("x", values) == {"x_p50_s": 50.0, "x_p90_s": 90.0, "x_p99_s": 99.0}


def test_a_run_that_was_written_can_be_read_and_drawn(tmp_path: Path) -> None:
    answers = [answer(0.0, 0.5, 0.6), answer(1.0, 1.2, 1.9, kind="long"), answer(1.0, 1.2, error="cut off")]
    (tmp_path / "run.json").write_bytes(msgspec.json.encode({"run": "0-baton", "answers": answers}))
    run = plots.read(tmp_path / "run.json")
    assert (run.run, run.answers) == ("0-baton", answers)
    assert plots.shares([3.0, 1.0]) == ([1.0, 3.0], [0.5, 1.0])
    pytest.importorskip("matplotlib")
    plots.draw([run], None, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_rounds_give_medians_and_spreads() -> None:
    rounds: list[dict[str, float | None]] = [
        {"a_s": 3.0, "b_s": None},
        {"a_s": 1.0, "b_s": 5.0},
        {"a_s": 2.0, "b_s": None},
    ]
    found = over_rounds(rounds)
    assert found == {"a_s": 2.0, "b_s": 5.0, "spread": {"a_s": [1.0, 3.0], "b_s": [5.0, 5.0]}, "rounds": 3}
