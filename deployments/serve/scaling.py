"""What runs in Serve's controller: the sizes of pools, by the session manager's plan or by the sessions that run.

Serve pickles these functions and this module by value, and everything else that they need by name. So this module
imports nothing of ours: the controller need not be able to import it. A policy is called ten times a second, and one
that raises stops all scaling. So it looks up numbers, and no more.

All that Baton takes from Serve's scaling beyond its documentation is here. An application's own policy is a field of
its YAML that Serve calls "not yet supported" (`autoscaling_policy`): it gets the contexts of all deployments that have
an `autoscaling_config`, and Serve leaves a deployment as it is that the policy does not answer for. The session manager
has such a configuration, of exactly one replica, because Serve asks only such deployments for their numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

SESSIONS = "baton_sessions"
"""The name by which a replica tells Serve how many sessions have a part on it (`record_autoscaling_stats`)."""
MANAGER = "session-manager"
"""The deployment that tells Serve the plan."""
TARGET = "baton_target/"
"""The session manager tells Serve each pool's planned replicas by this and the pool's name."""

POLICY = {"policy_function": f"{__name__}:by_sessions"}
"""`autoscaling_config`'s `policy` where the configuration sets none."""
PLANNED = {"policy_function": f"{__name__}:planned"}
"""The application's `autoscaling_policy` where the configuration has `scaling`."""
STAY = {"policy_function": f"{__name__}:stay"}
"""The `policy` of a pool that has a plan. It counts only where the application has no policy."""

MOST_METRICS_INTERVAL_S = 10.0
"""Serve's own default: a handle or replica tells Serve its numbers at least so often."""


def by_sessions(ctx: AutoscalingContext) -> tuple[int | float, dict[str, Any]]:
    """Serve's own policy, with a pool's sessions as its ongoing requests (`target_ongoing_requests`)."""
    told = (ctx.aggregated_metrics or {}).get(SESSIONS, {})
    ctx.total_num_requests = sum(told.values())  # a cached property, so this replaces its value
    decision: tuple[int | float, dict[str, Any]] = replica_queue_length_autoscaling_policy(ctx)
    return decision


def planned(contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """Every pool as the newest plan has it, within Serve's own bounds.

    Without a plan, because the manager has just begun or none was made, pools stay as they are. While the manager is
    away, the last plan has been carried out already.
    """
    targets = _newest(contexts)
    decisions = {
        deployment: min(
            max(targets[ctx.deployment_name], ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas
        )
        for deployment, ctx in contexts.items()
        if ctx.deployment_name in targets
    }
    return decisions, {}


def stay(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The size that the pool has."""
    return ctx.target_num_replicas, {}


def _newest(contexts: Mapping[Any, AutoscalingContext]) -> dict[str, int]:
    """Planned replicas by pool. While an update replaces the manager there are two, and the later word counts."""
    newest: dict[str, tuple[float, int]] = {}
    for ctx in contexts.values():
        if ctx.deployment_name != MANAGER:
            continue
        for name, told in (ctx.raw_metrics or {}).items():
            if not name.startswith(TARGET):
                continue
            for series in told.values():
                if series and math.isfinite(series[-1].value):
                    said = (series[-1].timestamp, int(series[-1].value))
                    pool = name[len(TARGET) :]
                    newest[pool] = max(newest.get(pool, said), said)
    return {pool: replicas for pool, (_, replicas) in newest.items()}


def pool_scaling(least: int, most: int, first: int) -> dict[str, Any]:
    """The `autoscaling_config` of a pool that has a plan. The plan has waited already, so Serve does not wait again."""
    return {
        "min_replicas": least,
        "max_replicas": most,
        "initial_replicas": first,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "policy": STAY,
    }


def manager_scaling(interval_s: float) -> AutoscalingConfig:
    """The `autoscaling_config` of the session manager: one replica, whose plan Serve knows soon after it is made.

    Its numbers are noted every fifth of `look_back_period_s` and sent every `metrics_interval_s`. All handles to the
    manager, one for each replica and ingress, send theirs as often.
    """
    with warnings.catch_warnings():
        # Serve announces environment variables instead of this field, and does not read them yet.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=1,
            max_replicas=1,
            metrics_interval_s=min(interval_s, MOST_METRICS_INTERVAL_S),
            look_back_period_s=2 * min(interval_s, MOST_METRICS_INTERVAL_S),
            policy=STAY,
        )
