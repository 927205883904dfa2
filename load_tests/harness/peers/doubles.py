"""The servers of the overhead benchmark, each with an engine that computes nothing and takes `step_s` per step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from load_tests.harness.application import ROOT, free_port
from load_tests.harness.peers import commands
from load_tests.harness.peers.group import Group
from load_tests.harness.peers.peers import (
    ONE_INGRESS,
    ONE_PROCESS,
    Peer,
    ray_application,
    run_baton,
    run_on_ray,
    variables,
)
from load_tests.harness.peers.settings import Settings

MODEL = "mock"
MOST_STREAMS = 1024
BLOCK_TOKENS = 32  # what vLLM's attention prefers on CPU
MOST_TOKENS = 640  # prompt and answer


@dataclass(frozen=True)
class Double:
    """What the servers are started with. `ingresses`: the number of Baton's ingresses."""

    step_s: float
    settings: Settings
    ingresses: int = 1


@contextlib.contextmanager
def started(name: str, double: Double, directory: Path) -> Iterator[Peer]:
    """Start a server, and end it. Raises PeerError."""
    environment = dict(double.settings.environment) | variables(name) | {"PYTHONPATH": str(ROOT)}
    group = Group(name, directory, environment)
    try:
        url = DOUBLES[name](group, double, directory)
        yield Peer(name, (url,), MODEL, group.wait([url], MODEL), (), group)
    finally:
        group.stop()


def _starlette(group: Group, double: Double, directory: Path) -> str:
    del directory
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "load_tests.harness.peers.plain_server",
        f"--port={port}",
        f"--step-s={double.step_s}",
    ]
    group.run(command)
    return f"http://127.0.0.1:{port}"


def _baton_serve_proxy(group: Group, double: Double, directory: Path) -> str:
    return _baton(group, double, directory, "--proxy=serve")


def _baton_without_metrics(group: Group, double: Double, directory: Path) -> str:
    return _baton(group, double, directory, metrics=False)


def _baton_unsplit(group: Group, double: Double, directory: Path) -> str:
    return _baton(group, double, directory, unsplit_tokens=MOST_TOKENS)


def _baton(
    group: Group, double: Double, directory: Path, *more: str, unsplit_tokens: int = 1, metrics: bool = True
) -> str:
    """`configs/mock.yaml` with one replica of each role, room for all streams, and engines that compute nothing."""
    serve = yaml.safe_load((ROOT / "configs" / "mock.yaml").read_text())
    arguments = serve["applications"][0]["args"]
    arguments["model"]["name"] = MODEL
    engine = {
        "kind": "mock",
        "computes": False,
        "step_s": double.step_s,
        "prefill_tokens_per_s": 1e9,
        "block_size": BLOCK_TOKENS,
        "num_blocks": MOST_STREAMS * MOST_TOKENS // BLOCK_TOKENS,
        "max_num_seqs": MOST_STREAMS,
        "max_num_batched_tokens": MOST_STREAMS * BLOCK_TOKENS,
    }
    pool = {"resources": {"num_cpus": 0.1}, "engine": engine}
    placement = {"split": "always", "split_min_prompt_tokens": unsplit_tokens}
    arguments |= {"prefill": pool, "decode": {"main": pool}, "placement": placement, "metrics": metrics}
    arguments["ingress"] = {"replicas": double.ingresses, "max_ongoing_requests": 2 * MOST_STREAMS}
    return run_baton(group, serve, directory, *more)


def engine_arguments(step_s: float) -> dict[str, Any]:
    """Arguments of vLLM with a worker that computes nothing.

    The model has one layer and no weights; it is there for its tokeniser.
    """
    return {
        "dtype": "float32",
        "load_format": "dummy",
        "hf_overrides": {"num_hidden_layers": 1},
        "max_model_len": 2048,
        "max_num_seqs": MOST_STREAMS,
        "max_num_batched_tokens": MOST_STREAMS * BLOCK_TOKENS,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "kv_cache_memory_bytes": 1024 * 1024 * 1024,
        "worker_cls": "load_tests.harness.peers.free_worker.FreeWorker",
        "additional_config": {"step_s": step_s},
    }


def _vllm(group: Group, double: Double, directory: Path) -> str:
    del directory
    port = free_port()
    where = {"host": "127.0.0.1", "port": port, "served_model_name": MODEL}
    arguments = engine_arguments(double.step_s) | {"distributed_executor_backend": ONE_PROCESS}
    group.run(commands.vllm_serve(double.settings.path, where | arguments))
    return f"http://127.0.0.1:{port}"


def _rayllm_direct(group: Group, double: Double, directory: Path) -> str:
    return _rayllm(group, double, directory, is_direct=True)


def _rayllm(group: Group, double: Double, directory: Path, is_direct: bool = False) -> str:
    """Ray Serve LLM's plain application with one replica.

    Its prefill-decode application has one more hop and one more engine.
    """
    config = {
        "model_loading_config": {"model_id": MODEL, "model_source": double.settings.path},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "runtime_env": {"env_vars": dict(double.settings.environment)},
        "engine_kwargs": engine_arguments(double.step_s),
        "deployment_config": {"num_replicas": 1, "max_ongoing_requests": 2 * MOST_STREAMS},
    }
    ingress = {} if is_direct else ONE_INGRESS | {"max_ongoing_requests": 2 * MOST_STREAMS}
    arguments = {"llm_configs": [config], "ingress_deployment_config": ingress}
    port = free_port()
    return run_on_ray(group, ray_application("ray.serve.llm:build_openai_app", arguments, port), directory)


DOUBLES: dict[str, Callable[[Group, Double, Path], str]] = {
    "baton": _baton,
    "baton_unsplit": _baton_unsplit,
    "baton_without_metrics": _baton_without_metrics,
    "baton_serve_proxy": _baton_serve_proxy,
    "starlette": _starlette,
    "rayllm": _rayllm,
    "rayllm_direct": _rayllm_direct,
    "vllm": _vllm,
}
