"""TCP ports of this machine: which are free, which answer, and one for a server of ours. Does not import ray."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_RESERVED = range(20_000, 22_000)  # above those of Ray's workers, below those of ingresses (`haproxy.py`)
_CLAIMS: list[socket.socket] = []


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


def free_port(host: str, but: Collection[int] = ()) -> int:
    """A port of `host`, none of `but`, that was free a moment ago.

    While this process lives, no other call gives the same port, in any process, and the system gives it to no process
    that asks for any port. A port that the system chooses would not do: it may choose the same port again for another
    process before the first one listens, minutes later.
    """
    ports = range(_RESERVED.start, min(_RESERVED.stop, _chosen_by_the_system().start))
    for port in random.sample(ports, len(ports)):
        if port not in but and port_is_free(host, port) and _claim(port):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _claim(port: int) -> bool:
    """Whether no other process has claimed a TCP port by this function. The claim is the UDP port of the same number,
    which the system takes back when this process ends."""
    sign = socket.socket(type=socket.SOCK_DGRAM)
    try:
        sign.bind(("127.0.0.1", port))
    except OSError:
        sign.close()
        return False
    _CLAIMS.append(sign)
    return True


def _chosen_by_the_system() -> range:
    """The ports that the system gives to connections, and to listeners that ask for any port."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(first), int(last) + 1)
