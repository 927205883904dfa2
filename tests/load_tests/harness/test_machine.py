"""What a benchmark says of the machine that it ran on."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests.harness.machine import Stolen, autogroups


def test_stolen_time_counts_from_when_it_was_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = iter(
        ("10 0 10 80 0 0 0 0 0 0", "15 0 10 80 0 0 0 5 0 0", "15 0 10 80 0 0 0 5 0 0", "15 0 10 81 0 0 0 8 9 9")
    )
    monkeypatch.setattr(Path, "read_text", lambda self: f"cpu  {next(totals)}\ncpu0 1 2 3\n")
    stolen = Stolen()
    assert stolen.share() == 0.5
    assert stolen.share() == 0, "no time has passed"
    assert stolen.share() == 0.75, "and guests' time is not counted twice"


def test_whether_sessions_are_scheduled_as_groups_is_said(tmp_path: Path) -> None:
    setting = tmp_path / "sched_autogroup_enabled"
    assert autogroups(setting) is None
    for text, said in (("1\n", True), ("0\n", False)):
        setting.write_text(text)
        assert autogroups(setting) is said
