"""The launcher's pure part: from a Serve configuration to the effective one, and what to print about it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from app.launch.ports import RayPorts
from configs.schema import BatonConfig
from deployments.replica.drain import STOP_S

PLANNED = "deployments.serve.scaling:planned"
"""The application's `autoscaling_policy` that carries a plan out. The launcher does not import ray, which it needs."""


class LaunchError(Exception):
    """The reason why nothing is being served."""


def load_config(path: Path, port: int | None) -> dict[str, Any]:
    """Read a Serve configuration, validate its one application, and set the HTTP port."""
    try:
        config = yaml.safe_load(path.read_text())
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise LaunchError(f"{path} is not YAML: {error}") from error
    applications = config.get("applications") if isinstance(config, dict) else None
    if not isinstance(applications, list) or len(applications) != 1:
        raise LaunchError(f"{path} must hold exactly one entry under `applications`")
    _check_policy(config["applications"][0], model_of(config, path), path)
    http = {"host": "127.0.0.1", "port": 8000} | (config.get("http_options") or {})
    effective: dict[str, Any] = config | {"http_options": http | ({"port": port} if port else {})}
    return effective


def model_of(config: Mapping[str, Any], path: Path | None = None) -> BatonConfig:
    """The application's arguments, typed."""
    try:
        return BatonConfig.model_validate(config["applications"][0].get("args") or {})
    except ValidationError as error:
        raise LaunchError(f"{path or 'the configuration'} is not valid:\n{error}") from error


def _check_policy(application: Mapping[str, Any], baton: BatonConfig, path: Path) -> None:
    """Serve carries a plan out only where the application says so, and then only a plan. No code can say it."""
    policy = application.get("autoscaling_policy")
    says_so = isinstance(policy, Mapping) and policy.get("policy_function") == PLANNED
    if baton.scaling is not None and not says_so:
        raise LaunchError(
            f"{path} has `scaling`, so its application needs, beside `args`:\n"
            f"    autoscaling_policy: {{policy_function: {PLANNED}}}"
        )
    if baton.scaling is None and says_so:
        raise LaunchError(
            f"{path} has the `autoscaling_policy` {PLANNED}, which needs `scaling` in `args`, even as `{{}}`: "
            "without it no pool would scale"
        )


def cpus_needed(baton: BatonConfig) -> int:
    """Logical CPUs for a Ray of our own: what an application takes in an update at its largest size, and at least 8."""
    pools = baton.pools.values()
    sizes = [(pool.autoscaling or {}).get("max_replicas", pool.replicas or 1) for pool in pools]
    taken = sum(
        with_surge(size, pool.surge_percent) * pool.resources.num_cpus for size, pool in zip(sizes, pools, strict=True)
    )
    ingress = (baton.ingress.count(len(os.sched_getaffinity(0))) + 1) * baton.ingress.num_cpus
    return max(8, math.ceil(float(taken) + ingress + 1))


def with_surge(replicas: int, surge_percent: int) -> int:
    """The most replicas that an update runs at once, as Serve rounds."""
    return replicas + (replicas * surge_percent + 99) // 100


def stop_limit_s(baton: BatonConfig) -> float:
    """The longest time until an application has ended once it is taken away: all parts of it end at the same time."""
    return max(baton.ingress.drain_s, baton.placement.drain_s) + STOP_S + 5.0


def with_model(config: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    """The same configuration, with a prepared checkpoint as its model source."""
    changed = deepcopy(dict(config))
    arguments = changed["applications"][0].get("args") or {}
    arguments["model"] = (arguments.get("model") or {}) | {"source": checkpoint}
    changed["applications"][0]["args"] = arguments
    return changed


def with_client_header(config: Mapping[str, Any], header: str) -> dict[str, Any]:
    """The same configuration, with the header in which our own proxy gives clients' addresses, unless it names one."""
    changed = deepcopy(dict(config))
    arguments = changed["applications"][0].get("args") or {}
    arguments["ingress"] = {"client_header": header} | (arguments.get("ingress") or {})
    changed["applications"][0]["args"] = arguments
    return changed


def base_url(config: Mapping[str, Any]) -> str:
    """Where a client on this machine reaches the application."""
    http = config["http_options"]
    host = "127.0.0.1" if http["host"] in ("0.0.0.0", "::") else http["host"]
    prefix = config["applications"][0].get("route_prefix") or "/"
    return f"http://{host}:{http['port']}{prefix.rstrip('/')}"


def curl_line(url: str, model: str) -> str:
    """A command to copy: one chat question."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": question, "max_tokens": 32, "temperature": 0})
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def parse_address(address: str | None, ray_port: int, dashboard_port: int) -> RayPorts:
    """`host:port` of a Ray cluster, or our own on loopback."""
    if not address:
        return RayPorts("127.0.0.1", ray_port, dashboard_port)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"the Ray address must be host:port, not {address!r}")
    return RayPorts(host, int(port), dashboard_port)
