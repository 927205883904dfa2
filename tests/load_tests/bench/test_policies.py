"""The benchmark of policies: its verdict on figures made by hand, and one short run from end to end."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from load_tests.bench.policies import ADMITTED, LARGE_POLICIES, POLICIES, _many, _with_many, experiments, parse
from load_tests.simulator import caches
from load_tests.simulator.experiment import perform
from load_tests.simulator.verdict import Row, compare, knee

ROOT = Path(__file__).resolve().parents[3]
RUN_KEYS = {
    *("trace", "replicas", "rate", "policy", "admission", "goodput", "ttft_p50_s", "ttft_p99_s"),
    *("tpot_p50_s", "tpot_p99_s", "hit_rate", "preemptions", "refused", "whole_goodput", "whole_refused"),
}


def row(policy: str, load: float, share: float, admission: bool = False, whole: float | None = None) -> Row:
    """At load 1.0 a hundred requests a second are offered. `whole`: the share of the whole run that is good."""
    offered = 100.0 * load
    goodput = {"goodput": offered * share, "whole_goodput": offered * (share if whole is None else whole)}
    figures = {"rate": offered, "offered": offered, **goodput}
    return {"policy": policy, "load": load, "admission": admission, **figures}


SWEEP = [
    *(row("round_robin", load, share) for load, share in ((0.5, 1.0), (0.8, 0.9), (1.0, 0.5), (2.0, 0.1))),
    *(row("least_tokens", load, share) for load, share in ((0.5, 1.0), (0.8, 0.99), (1.0, 0.8), (2.0, 0.2))),
    *(row("joint", load, share) for load, share in ((0.5, 1.0), (0.8, 1.0), (1.0, 0.97), (2.0, 0.2))),
    *(row("joint", load, share, True) for load, share in ((0.5, 1.0), (0.8, 1.0), (1.0, 0.96), (2.0, 0.46))),
    row("least_tokens", 1.0, 0.96, admission=True, whole=0.8),
]


def test_the_knee_is_where_the_best_of_the_others_begins_to_miss() -> None:
    assert knee(SWEEP) == 1.0
    assert knee([row("round_robin", 0.5, 1.0)]) is None


def test_the_verdict_compares_at_the_knee_and_under_overload() -> None:
    found = compare(SWEEP)
    assert found["goodput_ratio"] == {
        "with_admission": {"least_tokens": 1.0},
        "without_admission": {"round_robin": pytest.approx(1.94), "least_tokens": pytest.approx(1.2125)},
    }
    assert found["whole_goodput_ratio"] == {
        "with_admission": {"least_tokens": 1.2},
        "without_admission": found["goodput_ratio"]["without_admission"],
    }, "it refused many while it did not count"
    assert found["admission_ratio"] == {
        "round_robin": pytest.approx(1.92),
        "least_tokens": pytest.approx(1.2),
        "joint": pytest.approx(0.9897, abs=1e-4),
    }
    assert found["overload"]["with_admission"]["share_of_peak"] == pytest.approx(92 / 96, abs=1e-4)
    assert found["overload"]["without_admission"]["share_of_peak"] == pytest.approx(40 / 97, abs=1e-4)


def test_every_policy_runs_without_admission_and_joint_with_it_too() -> None:
    made = experiments(parse(["--quick", "--loads", "1.0", "--traces", "azure"]))
    assert sorted((one.policy, one.admission) for one in made) == sorted(
        [("joint", True), *((policy, False) for policy in POLICIES)]
    )


def test_a_large_fleet_gets_more_requests_and_fewer_runs() -> None:
    small, large = (experiments(parse(["--replicas", size, "--traces", "azure"])) for size in ("64", "1000"))
    assert len(large) < len(small)
    assert large[0].requests > 8 * small[0].requests
    assert set(LARGE_POLICIES) == {one.policy for one in large} < {one.policy for one in small}
    few = ["--replicas", "1000", "--traces", "azure", "--policies", "power_of_two", "--loads", "1"]
    asked = experiments(parse(few))
    assert [(one.policy, one.load) for one in asked] == [("power_of_two", 1.0)]


def test_another_share_of_the_fleet_may_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    made = experiments(parse(["--quick", "--traces", "poisson", "--policies", "joint", "--prefill", "6"]))
    row = perform(replace(made[0], requests=20))
    assert (row["replicas"], row["prefill_replicas"]) == (16, 6)
    assert perform(replace(made[0], requests=20, prefill=None))["prefill_replicas"] == 11
    with pytest.raises(SystemExit):
        parse(["--replicas", "64,8", "--prefill", "7"])
    assert "two replicas for decode" in capsys.readouterr().err


def test_at_the_knee_eight_ingresses_share_a_manager_and_eight_decide_for_themselves() -> None:
    rows = [{**each, "trace": "azure", "replicas": 16} for each in SWEEP]
    made = _with_many(parse(["--quick", "--loads", "0.5,1.0", "--traces", "azure"]), rows)
    assert [(one.load, one.ingresses, one.allocators, one.snapshot_delay_s) for one in made] == [
        (1.0, 8, 1, 0.1),
        (1.0, 8, 8, 0.1),
    ]
    ours = row("joint", 1.0, 0.96, True)
    late = [{**ours, "goodput": goodput, "preemptions": 0, "allocators": n} for goodput, n in ((95.0, 1), (48.0, 8))]
    found = _many(rows, late)
    assert {name: each["ratio"] for name, each in found.items()} == {"ingress8": 0.9896, "allocators8": 0.5}


def test_caches_are_compared_with_the_same_run_of_each_other_form() -> None:
    one = parse(["--traces", "agents", "--loads", "1.2", "--policies", "joint", "--tier-gb", "200"])
    forms = caches.forms(next(each for each in experiments(one) if not each.admission))
    assert [(form.policy, dict(form.placement), form.always_fetch) for form in forms.values()] == [
        ("overlap_cost", {}, False),
        ("joint", {}, False),
        ("joint", {"fetch": True}, False),
        ("joint", {"fetch": True}, True),
    ]
    assert {form.tier_gb for form in forms.values()} == {200.0}
    served = {
        1.2: dict(zip(forms, (4.0, 5.0, 6.0, 0.0), strict=True)),
        1.6: dict(zip(forms, (8.0, 8.0, 6.0, 6.0), strict=True)),
    }
    rows = [
        {"trace": "agents", "replicas": 16, "load": load, "caches": name, "goodput": goodput}
        for load, goodputs in served.items()
        for name, goodput in goodputs.items()
    ]
    assert caches.compare(rows) == {
        "agents-16": {
            "1.2": {"affinity": 1.5, "joint": 1.2, "always": None},
            "1.6": {"affinity": 0.75, "joint": 0.75, "always": 1.0},
        }
    }


def trace_files(folder: Path) -> None:
    rng = random.Random(1)
    lines = [
        json.dumps(
            {
                "timestamp": 100 * index,
                "input_length": 512 * (depth := rng.randint(1, 20)),
                "output_length": rng.randint(1, 200),
                "hash_ids": [0, *range(100 * index, 100 * index + depth - 1)],
            }
        )
        for index in range(50)
    ]
    (folder / "mooncake_small.jsonl").write_text("\n".join(lines))
    rows = [f"2023-11-16 18:15:{i:02}.5,{rng.randint(20, 4000)},{rng.randint(1, 400)}" for i in range(50)]
    (folder / "azure_small.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "load_tests.bench.policies", *arguments],
        cwd=ROOT,
        env=os.environ | {"TRACES": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
def test_a_quick_run_ends_with_one_line_of_json(tmp_path: Path) -> None:
    trace_files(tmp_path)
    done = bench(tmp_path, "--quick", "--requests", "40", "--loads", "0.5,8")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"runs", "summary", "conditions"}
    assert all(set(run) >= RUN_KEYS for run in result["runs"])
    seen = Counter((run["trace"], run["load"], run["admission"]) for run in result["runs"])
    for trace, load in itertools.product(("mooncake", "azure"), (0.5, 8.0)):
        at_knee = result["summary"][f"{trace}-16"]["knee_load"] == load
        ours = 3 if at_knee else 1  # with many ingresses, and many allocators
        assert seen[trace, load, False] == len(POLICIES)
        assert seen[trace, load, True] == ours + (len(ADMITTED) if at_knee else 0)
    assert set(result["summary"]) == {"mooncake-16", "azure-16"}
    assert any(run["hit_rate"] > 0 for run in result["runs"] if run["trace"] == "mooncake")
    assert result["conditions"]["seed"] == 1


@pytest.mark.slow
def test_caches_are_compared_by_one_sweep(tmp_path: Path) -> None:
    trace_files(tmp_path)
    done = bench(tmp_path, "--quick", "--caches", "--requests", "40", "--loads", "0.5", "--tier-gb", "100")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    seen = Counter((run["trace"], run["caches"], run["policy"]) for run in result["runs"])
    forms = {("affinity", "overlap_cost"), ("joint", "joint"), ("fetch", "joint"), ("always", "joint")}
    assert seen == {(trace, *form): 1 for trace in ("mooncake", "azure") for form in forms}
    assert set(result["summary"]["mooncake-16"]["0.5"]) == {"affinity", "joint", "always"}


def test_without_traces_it_says_so(tmp_path: Path) -> None:
    done = bench(tmp_path, "--quick")
    assert done.returncode == 1
    assert f"no trace mooncake*.jsonl or mooncake*.csv in {tmp_path}" in done.stderr
