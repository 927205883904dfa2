"""Many lines take no more memory than a few thousand: upload, check, answers and output.

`--lines 1000000` asks for more than `make test` does by default.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from load_tests.harness.application import ROOT

FEW = 5_000
MIB = 1 << 20
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def batch_of(folder: Path, lines: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.app.batches.large_process", str(folder), str(lines)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["status"], found["counts"]) == ("completed", [lines] * 3)
    return found


def test_many_lines_take_no_more_memory_than_a_few_thousand(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The file of a million lines has some 400 MB. The check keeps 12 bytes of each line, and sorts them once."""
    lines = int(pytestconfig.getoption("lines"))
    few, many = (batch_of(tmp_path / str(number), number)["peaks"] for number in (FEW, lines))
    most_kib = (24 * MIB + 72 * lines) // 1024
    more = {name: many[name] - few[name] for name in many}
    assert {name: size for name, size in more.items() if size > most_kib} == {}
