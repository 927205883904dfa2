"""The transfer benchmark: its arithmetic on traces made by hand, its hold on processes, and one small real run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.host.processes import descendants, stat
from load_tests.bench.transfer import parse
from load_tests.harness.engines.rig import blocks
from load_tests.harness.machine import memcpy_gb_per_s
from load_tests.harness.processes import Guard, cpu_s, pause, resume
from load_tests.report.handoffs import (
    Event,
    Handoff,
    Move,
    TraceError,
    from_baton,
    from_nixl,
    median,
    percentile,
)
from load_tests.report.transfer import Sample, by_prompt, prefill_slowdown, targets

ROOT = Path(__file__).resolve().parents[3]
MB = 1_000_000


def event(t: float, name: str, session: str = "s", **fields: object) -> Event:
    return {"t": t, "event": name, "session": session, **fields}


def baton_trace() -> list[Event]:
    """Two chunks of 128 tokens, two layers: all but the last layer's last write are done when the pass ends at 12 s."""
    return [
        event(10.0, "forward_begin", computed=128),
        event(10.2, "layer_write", layer=0, blocks=1),
        event(10.3, "layer_written", layer=0, ok=True),
        event(10.4, "layer_write", layer=1, blocks=1),
        event(10.6, "layer_written", layer=1, ok=True),
        event(11.0, "forward_end", computed=128),
        event(11.0, "forward_begin", computed=256),
        event(11.2, "layer_write", layer=0, blocks=1),
        event(11.3, "layer_written", layer=0, ok=True),
        event(11.9, "layer_write", layer=1, blocks=1),
        event(12.0, "forward_end", computed=256),
        event(12.1, "layer_written", layer=1, ok=True),
        event(12.25, "received", ok=True),
        event(12.3, "received", session="another", ok=True),
    ]


def nixl_trace() -> list[Event]:
    return [
        event(10.0, "forward_end", computed=128),
        event(11.0, "forward_end", computed=256),
        event(11.2, "posted"),
        event(11.7, "received", ok=True),
        event(11.7, "moved", bytes=4 * MB),
    ]


def test_percentiles_are_values_that_occurred() -> None:
    values = [3.0, 1.0, 2.0]
    assert [percentile(values, share) for share in (0.01, 0.5, 0.67, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert median(values) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_a_handoff_that_overlaps() -> None:
    handoff = from_baton(baton_trace(), "s", 256, layer_block_bytes=MB)
    assert handoff.size == 4 * MB
    assert handoff.kv_ready_s == pytest.approx(0.25)
    assert handoff.kv_written_s == pytest.approx(0.1)
    assert handoff.overlap_share == 0.75
    assert handoff.span_s == pytest.approx(1.9)
    assert handoff.in_flight_s == pytest.approx(0.1 + 0.2 + 0.1 + 0.2)


def test_lines_of_several_files_need_no_order() -> None:
    assert from_baton(reversed(baton_trace()), "s", 256, MB) == from_baton(baton_trace(), "s", 256, MB)


def test_a_handoff_after_the_prefill() -> None:
    handoff = from_nixl(nixl_trace(), "s", 256)
    assert handoff == Handoff(11.0, 11.7, (Move(11.2, 11.7, 4 * MB),))
    assert handoff.overlap_share == 0.0
    assert handoff.span_s == handoff.in_flight_s == pytest.approx(0.5)


def test_time_with_several_writes_under_way_counts_once() -> None:
    handoff = Handoff(9.0, 9.0, (Move(1.0, 3.0, 1), Move(2.0, 2.5, 1), Move(2.9, 4.0, 1), Move(6.0, 7.0, 1)))
    assert handoff.in_flight_s == pytest.approx(4.0)


@pytest.mark.parametrize("missing", ["forward_end", "received", "moved", "posted"])
def test_a_trace_with_a_gap_gives_no_figure(missing: str) -> None:
    with pytest.raises(TraceError):
        from_nixl([line for line in nixl_trace() if line["event"] != missing], "s", 256)


def test_a_failed_handoff_gives_no_figure() -> None:
    trace = [line | ({"ok": False} if line["event"] == "received" else {}) for line in baton_trace()]
    with pytest.raises(TraceError, match="failed"):
        from_baton(trace, "s", 256, MB)


def test_a_prompt_that_was_not_computed_to_its_end_gives_no_figure() -> None:
    with pytest.raises(TraceError, match="never computed"):
        from_nixl(nixl_trace(), "s", 257)


def sample(system: str, prompt: int, ready_s: float, written_s: float = 0.9, prefill_s: float = 2.0) -> Sample:
    handoff = Handoff(1.0, 1.0 + ready_s, (Move(0.5, written_s, 100 * MB),))
    return Sample(system, prompt, handoff, 0.05, 0.03, prefill_s, 3.0, 2.0, 2.5)


def report(samples: list[Sample], idle: dict[str, float]) -> dict[str, object]:
    return {
        "by_prompt": by_prompt(samples),
        "idle_cpu_cores": idle,
        "prefill_slowdown": prefill_slowdown(samples, "baton"),
    }


def test_figures_are_by_prompt_and_system() -> None:
    rows = by_prompt([sample("vllm_pull", 1500, 0.05), *(sample("baton", 1500, ms / 1e3) for ms in (9, 5, 6))])
    assert list(rows) == ["1500"]
    assert set(rows["1500"]) == {"baton", "vllm_pull"}
    ours = rows["1500"]["baton"]
    assert (ours["repeats"], ours["bytes"], ours["kv_ready_ms_p50"], ours["kv_ready_ms_p99"]) == (3, 100 * MB, 6.0, 9.0)
    assert (ours["handoff_ms_p50"], ours["decode_step_ms_p50"]) == (50.0, 30.0)
    assert ours["cpu_s_per_gb"] == pytest.approx(5.0)  # half a second more for a tenth of a GB
    assert ours["gb_per_s"] == pytest.approx(0.25)


def test_the_slowdown_is_taken_where_the_prompt_is_nearest_1000_tokens() -> None:
    samples = [sample("baton", 128, 0.1, prefill_s=9.0), sample("vllm_pull", 1000, 0.1, prefill_s=9.0)]
    samples += [sample("baton", 1000, 0.1, prefill_s=seconds) for seconds in (2.02, 1.9, 2.04)]
    assert prefill_slowdown(samples, "baton") == {
        "prompt_tokens": 1000,
        "share": 0.01,
        "range": [-0.05, 0.02],
        "repeats": 3,
    }
    assert prefill_slowdown(samples, "vllm_push") is None


def test_targets_say_what_is_met_and_leave_out_what_was_not_measured() -> None:
    samples = [
        sample("baton", 512, 0.010),
        sample("baton", 1500, 0.010, written_s=1.1),
        sample("vllm_pull", 1500, 0.050),
        sample("baton", 4096, 0.016),
    ]
    found = targets(report(samples, {"baton": 0.019}))
    assert {name: row["met"] for name, row in found.items()} == {
        "kv_ready_at_1500_over_vllm_pull": True,
        "kv_ready_at_4096_over_512": False,
        "bytes_after_prefill_from_1000": False,
        "prefill_slowdown": True,
        "idle_cpu_cores": True,
    }
    few = targets(report(samples[:1], {"baton": 0.03}))
    assert {name: row["met"] for name, row in few.items()} == {"prefill_slowdown": True, "idle_cpu_cores": False}


def test_the_command_line() -> None:
    options = parse(["--prompts", "128,512", "--repeats", "3", "--systems", "baton,vllm_push"])
    assert (options.prompts, options.repeats, options.systems) == ([128, 512], 3, ["baton", "vllm_push"])
    for wrong in (["--systems", "vllm_pull"], ["--systems", "baton,other"], ["--prompts", "many"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_memcpy_is_measured() -> None:
    assert memcpy_gb_per_s(64 * 1024, 4 * 1024 * 1024) > 0.01


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def test_a_paused_process_uses_no_cpu(busy: subprocess.Popen[bytes]) -> None:
    assert busy.pid in descendants(os.getpid())
    pause([busy.pid])
    deadline = time.monotonic() + 60
    while (stat(busy.pid) or [""])[0] != "T":  # it stops when it has a core next
        assert time.monotonic() < deadline
    before_s = cpu_s([busy.pid])
    time.sleep(0.1)
    assert cpu_s([busy.pid]) == before_s
    resume([busy.pid])
    deadline = time.monotonic() + 60
    while cpu_s([busy.pid]) == before_s:
        assert time.monotonic() < deadline


def test_the_guard_ends_even_a_paused_process(busy: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    guard.watch([busy.pid])
    pause([busy.pid])
    guard.close()
    assert busy.wait(60) == -signal.SIGKILL


@pytest.mark.engine
@pytest.mark.timeout(580)
def test_a_small_run_adds_up() -> None:
    command = [sys.executable, "-m", "load_tests.bench.transfer"]
    options = ["--systems", "baton,vllm_pull", "--prompts", "128,300", "--repeats", "3", "--idle-s", "1"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for prompt in (128, 300):
        rows = result["by_prompt"][str(prompt)]
        assert set(rows) == {"baton", "vllm_pull"}
        for row in rows.values():
            # 30 layers, keys and values, 3 heads of 64 float32 values: SmolLM2-135M
            assert row["bytes"] == blocks(prompt) * 128 * 30 * 2 * 3 * 64 * 4
            assert row["handoff_ms_p50"] > 0
            assert row["in_flight_gb_per_s"] >= row["gb_per_s"] > 0
        assert 0 < rows["baton"]["overlap_share"] <= 1
        assert rows["vllm_pull"]["overlap_share"] == 0
    assert set(result["idle_cpu_cores"]) == {"baton", "vllm_pull"}
    assert result["prefill_slowdown"]["prompt_tokens"] == 300
    assert result["memcpy_gb_per_s"] > 0
    assert result["conditions"]["engine"]["chunk_tokens"] == "256"
    assert "idle_cpu_cores" in result["targets"]
