"""The guard of what the launcher starts: it removes Ray's file and a folder, and ends what a killed launcher leaves."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.launch.guard import Guard
from load_tests.harness import processes


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [lambda: Guard("BATON_RAY=of-no-process"), processes.Guard], ids=["launcher", "benchmarks"]
)
def test_a_guard_removes_it_when_it_is_closed(current: Path, kind: Callable[[], Guard | processes.Guard]) -> None:
    guard = kind()
    assert current.exists()
    guard.close()
    assert not current.exists()


_OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from app.launch.guard import Guard
guard = Guard("BATON_RAY=" + sys.argv[1], Path(sys.argv[2]))
command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
subprocess.Popen(command, env=os.environ | {"BATON_RAY": sys.argv[1]}, start_new_session=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_what_a_killed_launcher_leaves_is_ended_and_the_file_and_the_folder_removed(
    current: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    (folder / "inside").mkdir(parents=True)
    command = [sys.executable, "-c", _OWNER, current.parent.parent.name, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert current.exists()
        assert folder.exists()
        owner.kill()
        assert owner.stdout.read() == "", "the pipe ends with the last process that has it"
    deadline = time.monotonic() + 60.0
    while current.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not current.exists()
    assert not folder.exists()
