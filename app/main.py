"""The whole graph: ingress, session manager, one prefill pool, any number of decode pools.

No `from __future__ import annotations` here: Serve reads `build`'s annotation to validate a YAML's `args`.
"""

import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from app.ingress import Ingress
from configs.checks import bounds_of
from configs.schema import BatonConfig, PoolConfig, StoredResponsesConfig
from deployments.engine.build import environment, offline
from deployments.replica.drain import STOP_S
from deployments.serve.manager import ServeSessionManager
from deployments.serve.replica import ServeReplica
from deployments.serve.scaling import MANAGER, POLICY, manager_scaling, pool_scaling
from deployments.serve.stored import ServeResponseStore

NO_LIMIT = 100_000  # admission limits sessions, so Serve must never queue or refuse a placed one
ONE_MORE = 1
"""`max_surge_percent`, rounded up to one replica: an update starts a successor before it stops the old one."""
PLACED = RequestRouterConfig(request_router_class="deployments.serve.router:PlacedRouter")


def build(config: BatonConfig) -> Application:
    """The Serve application of a configuration: `serve run configs/cpu.yaml` calls this with its `args`."""
    ingresses = config.ingress.count(len(os.sched_getaffinity(0)))
    config = config.model_copy(update={"ingress": config.ingress.model_copy(update={"replicas": ingresses})})
    arguments = config.model_dump(mode="json")
    manager = serve.deployment(
        ServeSessionManager,
        name=MANAGER,
        max_ongoing_requests=NO_LIMIT,
        max_surge_percent=ONE_MORE,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=1,  # only this check finds a dead manager, and there is one manager
        health_check_timeout_s=10,
        autoscaling_config=manager_scaling(config.scaling.interval_s) if config.scaling else None,
        **_logs(config),
    ).bind(config)
    stored = config.ingress.stored_responses
    store = None if stored is None else _store(stored, _logs(config))
    pools = {
        name: serve.deployment(ServeReplica, name=name, **_options(config, name, pool)).bind(arguments, name, manager)
        for name, pool in config.pools.items()
    }
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=ingresses,
        max_ongoing_requests=config.ingress.max_ongoing_requests,
        max_surge_percent=ONE_MORE,
        graceful_shutdown_timeout_s=config.ingress.drain_s + STOP_S,
        **_logs(config, enable_access_log=False),  # its lines say no path; `ingress.access_log` has its own
        ray_actor_options={"num_cpus": config.ingress.num_cpus, "runtime_env": {"env_vars": _quiet(config)}},
    )
    return ingress.bind(arguments, manager, pools, store)


def _logs(config: BatonConfig, **settings: Any) -> dict[str, Any]:
    """How Serve writes its own lines in a deployment. Without anything to say, what the Serve file says counts."""
    if config.log_format == "json":
        settings["encoding"] = "JSON"
    return {"logging_config": LoggingConfig(**settings)} if settings else {}


def _store(config: StoredResponsesConfig, logs: dict[str, Any]) -> Application:
    """The store of responses, of exactly one replica."""
    return serve.deployment(
        ServeResponseStore,
        name="stored-responses",
        max_ongoing_requests=NO_LIMIT,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=1,  # only this check finds a dead store, and there is one store
        health_check_timeout_s=10,
        **logs,
    ).bind(config)


def _options(config: BatonConfig, name: str, pool: PoolConfig) -> dict[str, Any]:
    """A pool's Serve options."""
    resources = pool.resources
    actor: dict[str, Any] = {
        "num_cpus": resources.num_cpus,
        "num_gpus": resources.num_gpus,
        "resources": resources.custom,
        "runtime_env": {"env_vars": environment(config, name)},
    }
    if resources.accelerator_type is not None:
        actor["accelerator_type"] = resources.accelerator_type
    if unknown := (pool.autoscaling or {}).keys() - AutoscalingConfig.model_fields.keys():
        raise ValueError(f"{name}: Serve's autoscaling has no {sorted(unknown)}")
    size: dict[str, Any] = {"num_replicas": pool.replicas or 1}
    if pool.autoscaling and config.scaling:
        size = {"autoscaling_config": pool_scaling(*bounds_of(pool))}
    elif pool.autoscaling:
        size = {"autoscaling_config": {"policy": POLICY, **pool.autoscaling}}
    return {
        **size,
        **_logs(config),
        "ray_actor_options": actor,
        "max_ongoing_requests": NO_LIMIT,
        "request_router_config": PLACED,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        "max_surge_percent": pool.surge_percent,
        "graceful_shutdown_timeout_s": config.placement.drain_s + STOP_S,
    }


def _quiet(config: BatonConfig) -> dict[str, str]:
    """The environment of an ingress, which tokenises and computes nothing else.

    Its code runs in Serve's own event loop. A second thread would take every event of every stream over once more.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        **offline(config),
    }
