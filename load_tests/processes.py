"""Processes of a benchmark: find them, read their CPU time, pause them, and see that they end.

`python -m load_tests.processes` is the guard: it reads `pid start-time` lines from stdin and, once stdin ends, kills
those of them that are still there. A pipe ends however its writer dies, and a paused process cannot watch for itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GUARD_TIMEOUT_S = 20.0


def descendants(root: int) -> set[int]:
    """Every process below `root`, itself excluded."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that these processes have used so far, all threads together, to the nanosecond.

    The clock's id is what `clock_getcpuclockid(3)` gives for a process; Python has it for threads only.
    """
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def pause(pids: Iterable[int]) -> None:
    """Stop processes until `resume`."""
    _signal(pids, signal.SIGSTOP)


def resume(pids: Iterable[int]) -> None:
    """Let paused processes run."""
    _signal(pids, signal.SIGCONT)


class Guard:
    """Kills the processes that it was told of when it is closed, or when this process ends in any way."""

    def __init__(self) -> None:
        # In a session of its own, so that Ctrl-C does not end the guard before those it guards.
        command = [sys.executable, "-m", "load_tests.processes"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pids: Iterable[int]) -> None:
        """From now on these must not outlive us."""
        assert self._process.stdin is not None
        for pid in pids:
            if fields := _stat(pid):
                self._process.stdin.write(f"{pid} {fields[19]}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill what is left of them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(GUARD_TIMEOUT_S)


def _stat(pid: int) -> list[str] | None:
    """`/proc/PID/stat` from its third field on (state, parent, ...; the 20th is the start time); None: no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _guard() -> None:
    for line in sys.stdin.readlines():
        pid, started = line.split()
        fields = _stat(int(pid))
        if fields and fields[19] == started:  # else the number is somebody else's by now
            _signal([int(pid)], signal.SIGKILL)


if __name__ == "__main__":
    _guard()
