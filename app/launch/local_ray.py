"""A Ray head node of our own: started as a child, and stopped to its last process. Does not import ray."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from app.launch.current_cluster import clear_ended_cluster
from app.launch.guard import Guard
from app.launch.ports import RayPorts, free_port, is_loopback

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_S = 5.0
_MARK = "BATON_RAY"  # in the environment of every process of this Ray, so that its guard finds them
_LIBC = ctypes.CDLL(None, use_errno=True)


# Ray replaces a loopback address by the machine's own and listens on every interface, without
# authentication. This variable (named after the systems where it is the default) lets it stay on loopback;
# its clients need it too.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# By default Serve looks at its replicas ten times a second, and each of its processes adds up metrics as often. On an
# idle machine that is a fifth of the CPU that Baton takes. Replicas that die are replaced up to 0.4 s later.
CALM = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5", "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000"}


def start_command(ports: RayPorts, num_cpus: int) -> list[str]:
    """The `ray start` command of a head node that blocks and owns its processes."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        f"--node-ip-address={ports.host}",
        f"--port={ports.gcs}",
        f"--dashboard-host={ports.host}",
        f"--dashboard-port={ports.dashboard}",
        # Ray's fixed defaults for these two clash when a machine runs a second cluster.
        f"--dashboard-agent-listen-port={free_port(ports.host, {ports.gcs, ports.dashboard})}",
        f"--ray-client-server-port={free_port(ports.host, {ports.gcs, ports.dashboard})}",
        f"--num-cpus={num_cpus}",
        "--include-dashboard=true",
        "--disable-usage-stats",
    ]


class LocalRay:
    """One `ray start --head --block` and everything that descends from it."""

    def __init__(self, ports: RayPorts, num_cpus: int, log: Path, environment: Mapping[str, str], folder: Path) -> None:
        """`folder`: for files of its processes. It goes away with them, also when this process is killed."""
        # Orphans of the head node become children of this process, so that none is lost at the end.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        clear_ended_cluster()  # of a Ray that was killed together with its guard
        mark = uuid.uuid4().hex
        self._guard = Guard(f"{_MARK}={mark}", folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                start_command(ports, num_cpus),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**head_environment(ports.host, environment), _MARK: mark},
                start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone
                preexec_fn=die_with_parent,
            )
        self.log = log

    def exit_status(self) -> int | None:
        """The exit status when the head node has ended, else None."""
        return self._process.poll()

    def reap_orphans(self) -> None:
        """Collect processes of the cluster that ended after their parent: they are children of this subreaper."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, look)) is not None and ended.si_pid != self._process.pid:
                os.waitpid(ended.si_pid, os.WNOHANG)

    def stop(self, timeout_s: float = 20.0) -> None:
        """Terminate the head node, wait, then kill what is left of its processes."""
        known = self._descendants()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._end_leftovers(known, timeout_s=5.0)
        self._guard.close()

    def kill(self) -> None:
        """Kill every process of the head node at once."""
        self._end_leftovers(self._descendants(), timeout_s=0.0)
        self._guard.close()

    def _descendants(self) -> dict[int, int]:
        """Every process below this one except the guard, which is the last to end."""
        return {pid: started for pid, started in descendants(os.getpid()).items() if pid != self._guard.pid}

    def _end_leftovers(self, known: dict[int, int], timeout_s: float) -> None:
        """Give processes `timeout_s` to end by themselves, then kill them, at least once; bounded."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and _alive(known | self._descendants()):
            _reap()
            time.sleep(0.1)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while left := _alive(known | self._descendants()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            _reap()
            # Checked after the kill: on a stalled machine one look may take the whole budget.
            if time.monotonic() > deadline:
                break
        _reap()


def descendants(root: int) -> dict[int, int]:
    """Every live descendant of `root`: pid -> start time in clock ticks, which tells a reused pid apart."""
    processes = {pid: stat for entry in Path("/proc").iterdir() if (pid := _pid(entry)) and (stat := _stat(pid))}
    found: dict[int, int] = {}
    parents = {root}
    while parents:
        children = {pid: started for pid, (parent, started) in processes.items() if parent in parents}
        parents = set(children) - set(found)
        found |= children
    return found


def _pid(entry: Path) -> int:
    return int(entry.name) if entry.name.isdigit() else 0


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start time of a process that is no zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def _alive(known: Mapping[int, int]) -> list[int]:
    return [pid for pid, started in known.items() if (stat := _stat(pid)) and stat[1] == started]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def head_environment(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Ray at `host`: this one, and what Baton sets. What is set in `CALM` may be set otherwise."""
    # The application is shut down before Ray is: draining the node again would wait 30 s for nothing.
    variables = {**CALM, **environment, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    return variables | LOOPBACK_ONLY if is_loopback(host) else variables


def die_with_parent() -> None:
    """For a new process: it gets SIGTERM when the thread that started it ends in any way."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)
