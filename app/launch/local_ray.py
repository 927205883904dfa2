"""A Ray head node of our own: started as a child, stopped to its last process. Does not import ray."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_S = 5.0
_GIVEN_TO_NOBODY = range(20_000, 22_000)  # above those of Ray's workers, below those of ingresses (`haproxy.py`)
_CLAIMS: list[socket.socket] = []
_LIBC = ctypes.CDLL(None, use_errno=True)


# Ray replaces a loopback address by the machine's own and listens on every interface, without
# authentication. This variable (named after the systems where it is the default) lets it stay on loopback;
# its clients need it too.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True)
class RayPorts:
    """Where a head node listens; `host` serves GCS and dashboard alike."""

    host: str
    gcs: int
    dashboard: int


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    return host == "localhost" or host.startswith("127.")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on `host:port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port_answers(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether something accepts connections on `host:port`."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


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

    def __init__(self, ports: RayPorts, num_cpus: int, log: Path, environment: Mapping[str, str]) -> None:
        # Orphans of the head node become children of this process, so that none is lost at the end.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                start_command(ports, num_cpus),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **_environment(ports.host)},
                start_new_session=True,  # a Ctrl-C in the terminal is ours alone
                preexec_fn=_die_with_parent,
            )
        self.log = log

    def exit_status(self) -> int | None:
        """The exit status when the head node has ended, else None."""
        return self._process.poll()

    def reap_orphans(self) -> None:
        """Collect processes of the cluster that ended after their parent had: they are our children, as subreaper."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, look)) is not None and ended.si_pid != self._process.pid:
                os.waitpid(ended.si_pid, os.WNOHANG)

    def stop(self, timeout_s: float = 20.0) -> None:
        """Terminate the head node, wait, then kill whatever is left of its processes."""
        known = descendants(os.getpid())
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._end_leftovers(known, timeout_s=5.0)

    def kill(self) -> None:
        """Kill every process of the head node at once."""
        self._end_leftovers(descendants(os.getpid()), timeout_s=0.0)

    def _end_leftovers(self, known: dict[int, int], timeout_s: float) -> None:
        """Give processes `timeout_s` to end by themselves, then kill them, at least once; bounded."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and _alive(known | descendants(os.getpid())):
            _reap()
            time.sleep(0.1)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while left := _alive(known | descendants(os.getpid())):
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


def free_port(host: str, but: Collection[int] = ()) -> int:
    """A port of `host`, none of `but`, that was free a moment ago, and that nobody takes who does not ask for it by its
    number: no other call gives it to anybody while this process lives.

    A port that the system chooses it may choose again for any process before it is listened on, minutes later.
    """
    ports = range(_GIVEN_TO_NOBODY.start, min(_GIVEN_TO_NOBODY.stop, _chosen_by_the_system().start))
    for port in random.sample(ports, len(ports)):
        if port not in but and port_is_free(host, port) and _claim(port):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _claim(port: int) -> bool:
    """Whether this process now has a TCP port for itself among all that ask so: UDP's port of that number is its sign,
    which the system takes back when the process ends."""
    sign = socket.socket(type=socket.SOCK_DGRAM)
    try:
        sign.bind(("127.0.0.1", port))
    except OSError:
        sign.close()
        return False
    _CLAIMS.append(sign)
    return True


def _chosen_by_the_system() -> range:
    """The ports of connections, and of listeners that leave theirs open."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(first), int(last) + 1)


def _environment(host: str) -> dict[str, str]:
    # The application is shut down before Ray is: draining the node again would wait 30 s for nothing.
    variables = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    if is_loopback(host):
        variables |= LOOPBACK_ONLY
    return variables


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)
