"""The guard of a Ray: it removes Ray's file and ends what a killed launcher leaves."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.launch.ray_guard import RayGuard
from load_tests.harness.processes import Guard


@pytest.mark.slow
@pytest.mark.parametrize("kind", [lambda: RayGuard("BATON_RAY=of-no-process"), Guard], ids=["launcher", "benchmarks"])
def test_a_guard_removes_it_when_it_is_closed(current: Path, kind: Callable[[], RayGuard | Guard]) -> None:
    guard = kind()
    assert current.exists()
    guard.close()
    assert not current.exists()


_OWNER = """
import os, subprocess, sys, time
from app.launch.ray_guard import RayGuard
guard = RayGuard("BATON_RAY=" + sys.argv[1])
command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
subprocess.Popen(command, env=os.environ | {"BATON_RAY": sys.argv[1]}, start_new_session=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_what_a_killed_launcher_leaves_is_ended_and_the_file_removed(current: Path) -> None:
    command = [sys.executable, "-c", _OWNER, current.parent.parent.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert current.exists()
        owner.kill()
        assert owner.stdout.read() == "", "the pipe ends with the last process that has it"
    deadline = time.monotonic() + 60.0
    while current.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not current.exists()
