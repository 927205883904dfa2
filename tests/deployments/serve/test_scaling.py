"""Serve's autoscaling counts the sessions that replicas tell of."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.serve.scaling import SESSIONS, by_sessions


def context(told: Any, replicas: int = 2, seen: float = 0.0) -> AutoscalingContext:
    """A pool of `replicas`; `seen`: the requests that Serve itself counts."""
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="decode-main",
        app_name="baton",
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        running_replicas=[],
        total_num_requests=seen,
        total_queued_requests=0.0,
        aggregated_metrics=told,
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=AutoscalingConfig(
            min_replicas=1, max_replicas=9, target_ongoing_requests=4, upscale_delay_s=0, downscale_delay_s=0
        ),
    )


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({SESSIONS: {"a": 4.0, "b": 4.0}}, 2),
        ({SESSIONS: {"a": 12.0, "b": 4.0}}, 4),
        ({SESSIONS: {"a": 1.0, "b": 0.0}}, 0.25),
        ({}, 0),
        (None, 0),
    ],
)
def test_a_pool_has_as_many_replicas_as_its_sessions_ask_for(told: Any, wanted: float) -> None:
    """Serve rounds, and keeps to the least and the most."""
    assert by_sessions(context(told))[0] == wanted


def test_what_serve_counts_itself_does_not_matter() -> None:
    assert by_sessions(context({SESSIONS: {"a": 4.0, "b": 4.0}}, seen=100.0))[0] == 2
