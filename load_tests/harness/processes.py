"""Processes of a benchmark: find them, read their CPU time, pause them, and make sure that they end.

`python -m load_tests.harness.processes` is the guard. It reads `pid start-time` lines from stdin. When stdin ends, it
kills those processes that still run and removes Ray's file that names their cluster. A pipe ends however its writer
dies. The processes cannot watch for this themselves, because a paused process does not run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from app.launch.current_cluster import clear_ended_cluster
from deployments.host.processes import marked as marked_pids
from deployments.host.processes import parents, stat

GUARD_TIMEOUT_S = 20.0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def children(root: int) -> set[int]:
    """Every process whose parent is `root`."""
    return {pid for pid, parent in parents().items() if parent == root}


def marked(entry: str) -> dict[int, str]:
    """Every process except this one that has `NAME=value` in its environment: its id and its title."""
    titles = {pid: title(pid) for pid in marked_pids(entry)}
    return {pid: name for pid, name in titles.items() if name}


def adopt_orphans(adopt: bool) -> bool:
    """Switch whether orphaned descendants become children of this process, so that none is lost.

    Returns whether they did before.
    """
    library, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    library.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
    return bool(before.value)


def reap(pids: Iterable[int]) -> None:
    """Collect the exit status of those processes that are children of this one and have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def title(pid: int) -> str:
    """A process's title, which is its command line; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def began(pid: int) -> str | None:
    """When a process began; None when it is gone. It tells two processes with the same id apart."""
    fields = stat(pid)
    return fields[19] if fields else None


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that these processes have used so far, over all threads, to the nanosecond.

    The clock's id is the one that `clock_getcpuclockid(3)` gives for a process. Python offers that function for threads
    only.
    """
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def cpu_by_process(pids: Iterable[int]) -> dict[int, float]:
    """`cpu_s` of each process that still runs."""
    used = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            used[pid] = cpu_s([pid])
    return used


def pause(pids: Iterable[int]) -> None:
    """Stop processes until `resume`."""
    _signal(pids, signal.SIGSTOP)


def resume(pids: Iterable[int]) -> None:
    """Let paused processes run."""
    _signal(pids, signal.SIGCONT)


class Guard:
    """Kills the processes that it was told of when it is closed, or when this process ends in any way.

    Then it removes Ray's file that names the current cluster, if that cluster has ended.
    """

    def __init__(self) -> None:
        # In a session of its own, so that Ctrl-C does not end the guard before the processes that it guards.
        command = [sys.executable, "-m", "load_tests.harness.processes"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pids: Iterable[int]) -> None:
        """From now on these processes end no later than this process."""
        assert self._process.stdin is not None
        for pid in pids:
            if when := began(pid):
                self._process.stdin.write(f"{pid} {when}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill those that still run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(GUARD_TIMEOUT_S)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _guard() -> None:
    watched = {int(pid): when for pid, when in map(str.split, sys.stdin.readlines())}
    deadline = time.monotonic() + GUARD_TIMEOUT_S / 2
    # If the start time differs, the id now belongs to another process.
    while (left := [pid for pid, when in watched.items() if began(pid) == when]) and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        time.sleep(0.1)
    clear_ended_cluster()


if __name__ == "__main__":
    _guard()
