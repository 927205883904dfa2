"""The benchmark of autoscalers: its verdict on figures made by hand, and short runs from end to end."""

from __future__ import annotations

from typing import Any

import pytest

from load_tests.bench.scaling import PARTS, Run, _fixed, _runs, cluster_of, parse, perform, summary
from load_tests.simulator.traces import DEFAULT_FOLDER


def row(policy: str, attainment: float, hours: float, **more: Any) -> dict[str, Any]:
    return {
        "trace": "wave",
        "policy": policy,
        "attainment": attainment,
        "replica_hours": hours,
        "first": [2, 2],
        **more,
    }


ROWS = [
    row("baton", 0.985, 6.0, most=[4, 8]),
    row("serve", 0.99, 12.0),
    row("keda", 0.90, 4.0),
    row("dynamo", 0.981, 8.0),
    row("fixed", 0.99, 14.0, first=[5, 10]),
    row("fixed", 0.99, 10.0, first=[4, 8]),
    row("fixed", 0.985, 9.0, first=[3, 7]),
    row("fixed", 0.90, 5.0, first=[2, 4]),
]


def test_the_verdict_compares_with_the_peak_the_best_fixed_size_and_the_best_other() -> None:
    found = summary(ROWS)
    assert found["attainment_of_peak"] == pytest.approx(0.985 / 0.99, abs=1e-4)
    assert found["hours_saved_of_peak"] == pytest.approx(0.4)
    assert found["best_fixed"]["sizes"] == [3, 7]
    assert found["hours_saved_of_best_fixed"] == pytest.approx(1 - 6 / 9, abs=1e-4)
    assert found["best_other"] == {"policy": "dynamo", "attainment": 0.981}
    assert found["hours_saved_of_best_other"] == pytest.approx(0.25)


def test_fixed_fleets_are_parts_of_the_largest_that_baton_came_to() -> None:
    made = _fixed(parse(["--traces", "wave"]), ROWS)
    assert len(made) == len(PARTS)
    assert {one.sizes for one in made} == {(4, 8), (3, 7), (3, 6)}


def test_a_wave_runs_once_more_with_its_season() -> None:
    made = _runs(parse(["--quick"]))
    assert [one.policy for one in made if one.season_s] == ["baton_season"]


@pytest.mark.parametrize(("option", "strict"), [("--strict", True), ("--no-strict", False)])
def test_pools_keep_to_their_roles_or_not(option: str, strict: bool) -> None:
    made = _runs(parse(["--traces", "steady", option]))
    assert {pool.strict for one in made for pool in cluster_of(one).pools} == {strict}


@pytest.mark.slow
def test_the_planner_follows_a_wave_and_every_rule_runs() -> None:
    ours = perform(Run("wave", "baton", 4.0, scale=0.5, wave_s=240.0, start_s=10.0))
    assert ours["attainment"] > 0.95
    assert ours["sizes"]["decode-main"]
    for policy in ("serve", "dynamo", "keda", "fixed"):
        assert perform(Run("wave", policy, 1.0, scale=0.2))["replica_hours"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not DEFAULT_FOLDER.is_dir(), reason="the traces are not here")
def test_real_traces_come_in_their_own_time() -> None:
    found = perform(Run("azure", "baton", 1.0, scale=0.25))
    assert found["requests"] > 0
    assert 25 < found["length_s"] < 60
