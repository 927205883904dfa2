"""The guard of what the launcher starts: it clears everything away, also when the launcher is killed.

`python -m app.launch.guard NAME=VALUE [FOLDER]`: every guarded process has this variable in its environment. The guard
reads stdin, a pipe, which ends when its writer ends in any way. Then the guard waits for those processes to end, kills
what is left of them, removes the folder, and Ray's file that names a cluster which has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from app.launch.current_cluster import clear_ended_cluster
from deployments.host.processes import marked

END_TIMEOUT_S, KILL_TIMEOUT_S = 20.0, 5.0


class Guard:
    """A guard in a process and a session of its own: a Ctrl-C in the terminal does not reach it."""

    def __init__(self, mark: str, folder: Path | None = None) -> None:
        """`mark`: the NAME=VALUE that the environment of every guarded process has. `folder`: goes away with them."""
        command = [sys.executable, "-m", "app.launch.guard", mark, *([] if folder is None else [str(folder)])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    def close(self) -> None:
        """Let the guard do its work now, and wait for it. Returns in bounded time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S + 2 * KILL_TIMEOUT_S)


def main(mark: str, folder: str | None = None) -> None:
    """Wait for the end of stdin, then clear away what is left."""
    sys.stdin.read()
    _wait_until_gone(mark, END_TIMEOUT_S)
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _wait_until_gone(mark, KILL_TIMEOUT_S)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    clear_ended_cluster()


def _wait_until_gone(mark: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
