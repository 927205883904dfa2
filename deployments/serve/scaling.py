"""Serve's autoscaling with the sessions that run, which Serve itself does not see: they do not go through it."""

from __future__ import annotations

from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

SESSIONS = "baton_sessions"
"""The name by which a replica tells Serve how many sessions have a part on it (`record_autoscaling_stats`)."""
POLICY = {"policy_function": f"{__name__}:by_sessions"}
"""`autoscaling_config`'s `policy` where the configuration sets none."""


def by_sessions(ctx: AutoscalingContext) -> tuple[int | float, dict[str, Any]]:
    """Serve's own policy, with a pool's sessions as its ongoing requests (`target_ongoing_requests`)."""
    told = (ctx.aggregated_metrics or {}).get(SESSIONS, {})
    ctx.total_num_requests = sum(told.values())  # a cached property, so this replaces its value
    decision: tuple[int | float, dict[str, Any]] = replica_queue_length_autoscaling_policy(ctx)
    return decision
