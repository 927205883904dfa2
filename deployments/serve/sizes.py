"""How many replicas Serve has of each deployment of this application."""

from __future__ import annotations

from collections.abc import Mapping

from ray.serve.schema import ApplicationStatusOverview

from deployments.manager.scaling import Size
from deployments.serve.own_application import own_application

COMING = ("STARTING", "UPDATING", "RECOVERING", "PENDING_MIGRATION")
SETTLED = "HEALTHY"


async def sizes() -> Mapping[str, Size] | None:
    """The sizes by deployment. None where Serve does not say."""
    application = await own_application()
    return None if application is None else sizes_of(application)


def sizes_of(application: ApplicationStatusOverview) -> dict[str, Size]:
    """The sizes by deployment. Replicas that stop do not count."""
    found = {}
    for name, deployment in application.deployments.items():
        states = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items()}
        coming = sum(states.get(state, 0) for state in COMING)
        found[name] = Size(states.get("RUNNING", 0), coming, deployment.status.value == SETTLED)
    return found
