"""The processes of one peer: it starts them, waits for them over HTTP, pins and pauses them, and ends all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from deployments.host.processes import descendants
from deployments.host.shared_memory import PREFIXES, SEMAPHORES, remove, shared_memory_of
from load_tests.harness.application import ROOT
from load_tests.harness.processes import Guard, adopt_orphans, began, children, pause, reap, resume, title

READY_TIMEOUT_S, STOP_TIMEOUT_S, KILL_TIMEOUT_S = 900.0, 60.0, 10.0  # Ray Serve LLM takes minutes on two cores
ANSWER_TIMEOUT_S = 20.0  # a request may wait for a replica, or hang
POLL_S = 0.25


class PeerError(Exception):
    """A peer did not start or did not end. The message names it, and ends with its log."""


class Group:
    """Commands of one peer, each in a process group of its own.

    Every process that becomes a child of this process while the group exists, and every descendant of it, counts as the
    peer's. Before a second group is made, the first one must be `complete`. The last one made ends first.
    """

    def __init__(self, name: str, directory: Path, environment: Mapping[str, str]) -> None:
        self._adopted = adopt_orphans(True)
        self.name, self._directory = name, directory
        self._sockets = tempfile.TemporaryDirectory(prefix="baton-")  # for vLLM's sockets, which it leaves behind
        ours = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        self._environment = ours | {"VLLM_RPC_BASE_PATH": self._sockets.name} | dict(environment)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._guard = Guard()
        self._watched: set[int] = set()
        self._others = children(os.getpid())  # the guard among them
        self._complete: set[int] | None = None
        self.began_s = time.monotonic()

    def run(self, command: Sequence[str]) -> None:
        """Start one more command. Its output goes to a log of its own."""
        log = self._directory / f"{self.name}-{len(self._processes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        self._watch()

    def wait(self, urls: Sequence[str], model: str) -> float:
        """Wait until every URL has answered a request. Returns seconds since the first command. Raises PeerError."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        for url in urls:
            while not _answers(url, model):
                self._check()
                self._watch()
                if time.monotonic() > deadline:
                    raise PeerError(f"{self.name} was not ready within {READY_TIMEOUT_S:.0f} s:\n{self._logs()}")
                time.sleep(POLL_S)
        ready_s = time.monotonic() - self.began_s
        self._watch()
        return ready_s

    def wait_for_port(self, port: int, timeout_s: float) -> None:
        """Wait until a process listens on the loopback port. Raises PeerError."""
        deadline = time.monotonic() + timeout_s
        while not _listens(port):
            self._check()
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name}: nothing at port {port} within {timeout_s:.0f} s:\n{self._logs()}")
            time.sleep(POLL_S)

    def pids(self) -> set[int]:
        """Every process of the peer."""
        made = children(os.getpid()) - self._others if self._complete is None else self._complete
        return made.union(*(descendants(pid) for pid in made))

    def complete(self) -> None:
        """The peer has all its processes. From now on only their descendants become the peer's."""
        self._watch()
        self._complete = self.pids()

    def pause(self) -> None:
        """Stop every process of the peer until `resume`, or until `stop`."""
        pause(self.pids())

    def resume(self) -> None:
        """Let every process of the peer run."""
        resume(self.pids())

    def engines(self) -> list[set[int]]:
        """The processes of each engine, in the order of their start: vLLM's engine core and its workers."""
        cores = sorted(pid for pid in self.pids() if title(pid).startswith("VLLM::EngineCore"))
        return [{pid} | descendants(pid) for pid in cores]

    def check_niceness(self) -> None:
        """Check that all engines have this process's niceness, so that no peer has an advantage. Raises PeerError."""
        expected = os.getpriority(os.PRIO_PROCESS, 0)
        for pid in set().union(*self.engines()):
            if (niceness := os.getpriority(os.PRIO_PROCESS, pid)) != expected:
                raise PeerError(f"{self.name}: {title(pid)} runs at niceness {niceness}, this process at {expected}")

    def pin(self) -> list[int]:
        """Pin all threads of each engine to one core, in turn. Returns the cores. Other processes are not pinned."""
        cores = sorted(os.sched_getaffinity(0))
        engines = self.engines()
        for number, pids in enumerate(engines):
            for pid in pids:
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread.name), {cores[number % len(cores)]})
        return [cores[number % len(cores)] for number in range(len(engines))]

    def stop(self) -> None:
        """Send Ctrl-C to each command, the last first, then kill what is left.

        Raises PeerError when a process still runs after that.
        """
        self.resume()
        known = {pid: began(pid) for pid in self.pids()}
        named = shared_memory_of(known, (*PREFIXES, SEMAPHORES))
        for process in reversed(self._processes):
            self._end(process)
        known |= {pid: began(pid) for pid in self.pids()}
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while left := [pid for pid, when in known.items() if when and began(pid) == when]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reap(left)
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name}: still there: {sorted(left)}")
            time.sleep(0.1)
        remove(named)  # what vLLM leaves behind when it is killed
        self._guard.close()
        self._sockets.cleanup()
        adopt_orphans(self._adopted)

    def _watch(self) -> None:
        """If this process is killed, the guard ends the peer's processes."""
        now = self.pids()
        self._guard.watch(now - self._watched)
        self._watched |= now

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        if process.poll() is None:
            process.kill()
            process.wait(KILL_TIMEOUT_S)

    def _check(self) -> None:
        for process in self._processes:
            if (status := process.poll()) is not None:
                raise PeerError(f"{self.name}: a command ended with status {status}:\n{self._logs()}")

    def _logs(self) -> str:
        files = sorted(self._directory.glob(f"{self.name}-*.log"))
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-3000:]}" for file in files)


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def _answers(url: str, model: str) -> bool:
    body = {"model": model, "prompt": [100, 200, 300], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S).status_code == 200
    except httpx.HTTPError:
        return False
