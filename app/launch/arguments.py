"""The launcher's command line."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of `python -m app.launch`. `arguments`: None: those of this process."""
    parser = argparse.ArgumentParser(prog="python -m app.launch.launcher", description="Serve a configuration.")
    parser.add_argument("--config", type=Path, default=Path("configs/cpu.yaml"))
    parser.add_argument("--port", type=int, help="HTTP port; default: the configuration's")
    parser.add_argument("--ray-address", help="host:port of a running cluster; default: one of our own")
    parser.add_argument("--ray-port", type=int, default=6379)
    parser.add_argument("--dashboard-port", type=int, default=8265)
    parser.add_argument(
        "--proxy",
        choices=("haproxy", "serve"),
        help="between clients and ingresses, in a Ray of our own: HAProxy (default) or Serve's own proxy in Python",
    )
    parser.add_argument("--observe", action="store_true", help="start Prometheus too, beside a Ray of our own")
    parser.add_argument("--prometheus-port", type=int, help="default: 9090, or another where that is busy")
    parser.add_argument("--num-cpus", type=int, help="logical CPUs of our own Ray; default: what is needed")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="the longest until ready")
    return parser.parse_args(arguments)
