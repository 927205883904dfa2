"""A Ray of the launcher's own: how it starts, and that no process of it survives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.serve._private import constants

from app.launch.local_ray import CALM, head_environment, start_command
from app.launch.ports import RayPorts


def test_ray_starts_on_the_given_ports_without_usage_statistics() -> None:
    command = start_command(RayPorts("127.0.0.1", 6380, 8266), num_cpus=3)
    assert {
        "--port=6380",
        "--dashboard-port=8266",
        "--num-cpus=3",
        "--disable-usage-stats",
        "--block",
    } <= set(command)


def test_serve_ticks_less_often_unless_it_is_told_how_often() -> None:
    assert CALM.items() <= head_environment("127.0.0.1", {}).items()
    name = next(iter(CALM))
    assert head_environment("127.0.0.1", {name: "7"})[name] == "7"


def test_serve_reads_the_variables_of_its_ticks() -> None:
    """Contract: a variable that Serve has renamed would leave its default, without a word."""
    known = Path(constants.__file__).read_text()
    assert [name for name in CALM if f'"{name}"' not in known] == []


# A head node in miniature: it outlives SIGTERM, and its grandchild has a session of its own.
_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""
_OWNER = f"""
import os, sys, time
from pathlib import Path
from app.launch import local_ray
from app.launch.ports import RayPorts
local_ray.start_command = lambda ports, cpus: [sys.executable, "-c", {_STUBBORN!r}]
log, folder = Path(sys.argv[1]), Path(sys.argv[3])
ray = local_ray.LocalRay(RayPorts("127.0.0.1", 1, 2), 1, log, os.environ, folder)
while "up" not in log.read_text():
    time.sleep(0.05)
print(*ray._descendants(), flush=True)
if sys.argv[2] == "stalled":  # the whole budget is gone before the first look
    local_ray.KILL_TIMEOUT_S = 0.0
if sys.argv[2] != "kill":
    ray.stop(timeout_s=0.5)
else:
    ray.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stop", "stalled", "kill"])
def test_no_process_of_ray_survives_and_no_file(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    owner = [sys.executable, "-c", _OWNER, str(tmp_path / "log"), way, str(folder)]
    done = subprocess.run(owner, capture_output=True, text=True, timeout=60, check=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    try:
        deadline = time.monotonic() + 60.0
        while (_live(pids) or folder.exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _live(pids)
        assert not folder.exists()
    finally:
        for pid in _live(pids):
            os.kill(pid, signal.SIGKILL)


def _live(pids: list[int]) -> list[int]:
    states = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return [pid for pid, state in states.items() if state not in "ZX"]
