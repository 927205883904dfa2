"""Ray's file that names the current cluster: it goes when that cluster has ended, however the launcher ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.launch.current_cluster import clear_ended_cluster, current_cluster_file
from app.launch.ports import free_port
from app.launch.ray_guard import RayGuard
from load_tests.harness.processes import Guard


@pytest.fixture
def current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in a folder of this test's own; it names a cluster that has ended."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file = current_cluster_file()
    file.parent.mkdir()
    file.write_text(f"127.0.0.1:{free_port('127.0.0.1')}")
    return file


def test_the_file_is_where_ray_has_it(current: Path) -> None:
    from ray._common.utils import get_ray_address_file

    assert str(current) == get_ray_address_file(None)


def test_the_file_of_an_ended_cluster_is_removed_once(current: Path) -> None:
    assert clear_ended_cluster()
    assert not current.exists()
    assert not clear_ended_cluster()


def test_the_file_of_a_living_cluster_stays(current: Path) -> None:
    with socket.socket() as living:
        living.bind(("127.0.0.1", 0))
        living.listen()
        current.write_text(f"127.0.0.1:{living.getsockname()[1]}")
        assert not clear_ended_cluster()
    assert current.exists()


@pytest.mark.parametrize("text", ["192.0.2.1:6379", "", "nonsense", "nowhere.invalid:6379"])
def test_the_file_of_a_cluster_elsewhere_stays(current: Path, text: str) -> None:
    current.write_text(text)
    assert not clear_ended_cluster()
    assert current.exists()


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
