"""The whole command on small traces, and its parts: what a fleet has to carry, its bounds, devices, output."""

from __future__ import annotations

import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from load_tests.plan.command import main
from load_tests.plan.demand import Demand, busiest, hopeless, least_work, room
from load_tests.plan.devices import DeviceError, known_devices, read_devices
from load_tests.plan.fleets import Fleet, kinds
from load_tests.plan.judge import judge
from load_tests.simulator import synthetic
from load_tests.simulator.metrics import Objectives
from load_tests.simulator.traces import Trace, TraceError, TraceRequest

H100, H200 = known_devices().values()
CHAT = (Objectives("chat", 1.0, 0.05),)


def demand(trace: Trace, target: float = 0.99) -> Demand:
    return Demand(trace, CHAT, target, 32768)


def steady(requests_per_s: float, count: int, prompt: int = 1000, output: int = 100) -> Trace:
    requests = (TraceRequest(number / requests_per_s, prompt, output) for number in range(count))
    return Trace("steady", 128, tuple(requests))


def written(trace: Trace, path: Path) -> Path:
    """In Mooncake's format, with blocks of the trace's size."""
    rows = (
        {
            "timestamp": 1e3 * each.at_s,
            "input_length": each.prompt_tokens,
            "output_length": each.output_tokens,
            "hash_ids": each.hashes,
            "block_tokens": trace.block_tokens,
            "outcome": "stop",
        }
        for each in trace.requests
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_busiest_part_is_taken_and_begins_at_zero() -> None:
    times = (0.0, 10.0, 11.0, 12.0, 40.0, 50.0)
    trace = Trace("t", 128, tuple(TraceRequest(at_s, number + 1, 5) for number, at_s in enumerate(times)))
    part = busiest(trace, 3)
    assert [(each.at_s, each.prompt_tokens) for each in part.requests] == [(0.0, 2), (1.0, 3), (2.0, 4)]
    faster = busiest(trace, 3, requests_per_s=1.0)  # 5 intervals in 50 s become 5 s
    assert [each.at_s for each in faster.requests] == pytest.approx([0.0, 0.1, 0.2])
    assert len(busiest(trace, 100).requests) == 6
    with pytest.raises(TraceError, match="rate"):
        busiest(Trace("t", 128, trace.requests[:1]), 3)


def test_the_least_work_grows_with_the_rate_and_shrinks_with_a_cache() -> None:
    slow, fast = (least_work(demand(steady(rate, 400)), H100).whole for rate in (10.0, 20.0))
    assert fast == pytest.approx(2 * slow, rel=0.02)
    talks = synthetic.conversations(20.0, 400, seed=1)
    cold = Trace("cold", 128, tuple(TraceRequest(e.at_s, e.prompt_tokens, e.output_tokens) for e in talks.requests))
    assert least_work(demand(talks), H100).prompts < 0.6 * least_work(demand(cold), H100).prompts


def test_no_fleet_under_the_bound_meets_the_objectives_and_some_above_it_does() -> None:
    """The bound may be low, but never too high."""
    asked = demand(steady(60.0, 400))
    for kind in kinds((H100,)):
        bounds = room(asked, kind)
        pools = len(kind.roles)
        under = bounds.least - 1
        assert under >= pools, "a bound that rules nothing out tests nothing"
        counts = (under,) if pools == 1 else (under - under // 2, under // 2)
        assert not judge(asked, Fleet(kind, counts), seed=1).meets
        assert judge(asked, Fleet(kind, tuple(2 * each for each in bounds.guess)), seed=1).meets


def test_prompts_that_take_too_long_alone_are_hopeless() -> None:
    assert hopeless(demand(steady(1.0, 10, prompt=1000)), H100) == 0
    assert hopeless(demand(steady(1.0, 10, prompt=30_000)), H100) == demand(steady(1.0, 10)).counted


def test_a_simulation_stops_when_it_cannot_meet_the_objectives_any_more() -> None:
    asked, fleet = demand(steady(60.0, 600)), Fleet(kinds((H100,), split=False)[0], (1,))
    early, whole = judge(asked, fleet, seed=1), judge(asked, fleet, seed=1, whole=True)
    assert not early.meets
    assert not whole.meets
    assert early.figures == {}
    assert whole.figures["counted"] == asked.counted
    assert whole.attained < early.attained < asked.target


def test_a_file_brings_devices_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    steps = "{base_s: 0.01, prefill_token_s: 5.0e-5, prefill_context_s: 0, sequence_s: 2.0e-5, context_s: 2.0e-8}"
    file.write_text(
        f"h100: {{cost: 2}}\nmine: {{cost: 0.5, steps: {steps}, kv_tokens: 120000, kv_bytes_per_token: 131072}}\n"
    )
    h100, mine = read_devices(file).values()
    assert (h100.cost, h100.profile) == (2.0, H100.profile)
    assert (mine.cost, mine.kv_tokens, mine.steps.prefill_token_s) == (0.5, 120_000, 5e-5)


@pytest.mark.parametrize(
    "text", ["h100: {cost: 0}", "mine: {cost: 1}", "h100: {}", "[1]", "mine: {cost: 1, steps: {base_s: 1}}", "{"]
)
def test_a_wrong_device_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(text)
    with pytest.raises(DeviceError, match=r"devices\.yaml"):
        read_devices(file)


def test_objectives_that_no_device_meets_are_refused_with_the_reason(tmp_path: Path) -> None:
    file = written(steady(1.0, 40, prompt=30_000), tmp_path / "long.jsonl")
    with pytest.raises(SystemExit, match="idle replica"):
        main(["plan", str(file), "--ttft", "0.5"])
    with pytest.raises(SystemExit, match="no trace nothing"):
        main(["plan", "nothing"])


@pytest.mark.parametrize("json_only", [False, True])
def test_what_is_simulated_is_counted_on_a_terminal(
    tmp_path: Path, on_terminal: Callable[[], io.StringIO], capsys: pytest.CaptureFixture[str], json_only: bool
) -> None:
    terminal = on_terminal()
    file = written(steady(20.0, 60), tmp_path / "traffic.jsonl")
    few = ["--use", "h100", "--roles", "mixed", "--most", "4", "--processes", "1"]
    main(["plan", str(file), *few, *(["--json"] if json_only else [])])
    printed, shown = capsys.readouterr().out.splitlines(), terminal.getvalue()
    found = json.loads(printed[-1])
    counts = [int(count) for count in re.findall(r"(\d+) fleets simulated", shown)]
    assert counts == sorted(counts)
    assert set(counts) == (set() if json_only else set(range(found["simulations"] + 1)))
    assert (len(printed) == 1) == json_only, "the table is for people"
    assert "mixed 1 x h100 " in shown, "a line for each fleet"


@pytest.mark.slow
def test_the_plan_meets_the_objectives_with_another_seed_and_one_replica_fewer_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with all kinds of pools: the issue's promise, on a trace that a small fleet carries."""
    trace, drawn = synthetic.poisson(40.0, 700, seed=5), tmp_path / "plan.svg"
    file = written(trace, tmp_path / "traffic.jsonl")
    main(["plan", str(file), "--use", "h100", "--most", "8", "--picture", str(drawn)])
    text = capsys.readouterr().out.splitlines()
    found = json.loads(text[-1])
    assert found["plan"]["meets"]
    assert found["plan"]["attained"] >= found["target"] == 0.99
    assert found["fewer"], "a fleet of one replica a pool tests nothing"
    assert not any(fewer["meets"] for fewer in found["fewer"])
    assert found["plan"]["seed"] == 3
    assert not found["is_cut"]
    others = [kind["cost"] for kind in found["kinds"].values() if kind is not None]
    assert found["plan"]["cost_per_hour"] == min(others)
    assert math.prod(pool["replicas"] for pool in found["plan"]["pools"]) > 1
    assert "the plan" in text[1]
    picture = ElementTree.fromstring(drawn.read_text())
    marks = [each for each in picture if each.tag.endswith("circle")]
    assert len(marks) > 4
