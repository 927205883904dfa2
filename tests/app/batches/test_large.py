"""A million lines take no more memory than a few thousand: upload, check, answers and output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from load_tests.harness.application import ROOT

FEW, MANY = 5_000, 1_000_000
MOST_MORE_KIB = 96 * 1024
"""Less than a quarter of the file, which has some 400 MB. The check keeps 12 MB of it, and sorts them once."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def batch_of(folder: Path, lines: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.app.batches.large_process", str(folder), str(lines)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["status"], found["counts"]) == ("completed", [lines] * 3)
    return found


def test_a_million_lines_take_no_more_memory_than_a_few_thousand(tmp_path: Path) -> None:
    few, many = (batch_of(tmp_path / str(lines), lines)["peaks"] for lines in (FEW, MANY))
    more = {name: many[name] - few[name] for name in many}
    assert {name: size for name, size in more.items() if size > MOST_MORE_KIB} == {}
