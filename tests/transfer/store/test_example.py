"""The example does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer.store import example


def test_the_second_store_finds_what_the_first_has_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["found: ['disk', 'disk', 'disk']", "loaded: [True, True, True]", "equal: True"]
