"""`baton doctor --transfer`: what it runs, and how its result reads."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import machine, main, transfers
from app.cli.doctor import Line

GOOD = {"ok": True, "bytes_verified": 2_500_000, "bandwidth": {"writes": [{"gb_per_s": 0.5}, {"gb_per_s": 1.25}]}}
BAD = {"ok": False, "error": "the prefill process failed"}


def test_each_way_is_tried_on_main_memory_and_the_gpu_by_the_default() -> None:
    asked: list[tuple[str, str | None]] = []

    def attempt(device: str, transports: str | None) -> dict[str, Any]:
        asked.append((device, transports))
        return GOOD

    lines = list(transfers.transfers(True, attempt))
    assert asked == [("cpu", None), ("cpu", "tcp"), ("cpu", "sm,tcp"), ("cuda", None)]
    assert {line.level for line in lines} == {"ok"}
    assert lines[0].found == "1.25 GB/s at most; 2 MB came as they were sent"
    asked.clear()
    assert len(list(transfers.transfers(False, attempt))) == len(asked) == 3


def test_only_a_way_that_baton_needs_is_a_fail() -> None:
    levels = [line.level for line in transfers.transfers(True, lambda *_: BAD)]
    assert levels == ["fail", "warn", "warn", "fail"]
    assert all(line.hint for line in transfers.transfers(True, lambda *_: BAD))


@pytest.mark.parametrize(
    ("printed", "error"),
    [("", "no figures"), ("[1]", "no figures"), ("nonsense", "no figures"), (None, "not over within")],
)
def test_a_check_that_gives_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, printed: str | None, error: str
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if printed is None:
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, 1, stdout=printed)

    monkeypatch.setattr(subprocess, "run", run)
    assert error in transfers._attempt("cpu", None)["error"]


def test_doctor_tries_it_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "examine", lambda: [Line("cores", "ok", "2")])
    monkeypatch.setattr(transfers, "transfers", lambda has_gpu: iter([Line("kv by TCP", "fail", "no", "why")]))
    runner = CliRunner()
    assert [each["check"] for each in json.loads(runner.invoke(main.app, ["doctor", "--json"]).stdout)["checks"]] == [
        "cores"
    ]
    shown = runner.invoke(main.app, ["doctor", "--json", "--transfer"])
    assert [each["check"] for each in json.loads(shown.stdout)["checks"]] == ["cores", "kv by TCP"]
    assert shown.exit_code == 1


@pytest.mark.slow
def test_kv_moves_between_two_processes_of_this_machine() -> None:
    """Real NIXL over UCX's choice of transports, as `baton doctor --transfer` runs it."""
    result = transfers._attempt("cpu", None)
    assert result.get("ok"), result
    assert result["bytes_verified"] > 0
