"""What a benchmark says of the machine that it ran on."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests.machine import Stolen


def test_stolen_time_counts_from_when_it_was_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = iter(
        ("10 0 10 80 0 0 0 0 0 0", "15 0 10 80 0 0 0 5 0 0", "15 0 10 80 0 0 0 5 0 0", "15 0 10 81 0 0 0 8 9 9")
    )
    monkeypatch.setattr(Path, "read_text", lambda self: f"cpu  {next(totals)}\ncpu0 1 2 3\n")
    stolen = Stolen()
    assert stolen.share() == 0.5
    assert stolen.share() == 0, "no time has passed"
    assert stolen.share() == 0.75, "and guests' time is not counted twice"
