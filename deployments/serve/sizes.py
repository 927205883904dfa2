"""How many replicas Serve has of each deployment of this application, by its public `serve.status`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview

from deployments.manager.scaling import Size

logger = logging.getLogger("baton.scaling")

STATUS_TIMEOUT_S = 5.0
COMING = ("STARTING", "UPDATING", "RECOVERING", "PENDING_MIGRATION")
SETTLED = "HEALTHY"


async def sizes() -> Mapping[str, Size] | None:
    """The sizes by deployment. None where Serve does not answer in time, or answers with an error."""
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            status = await asyncio.to_thread(serve.status)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("Serve does not say how many replicas there are: %r", error)
        return None
    application = status.applications.get(serve.get_replica_context().app_name)
    return None if application is None else sizes_of(application)


def sizes_of(application: ApplicationStatusOverview) -> dict[str, Size]:
    """The sizes by deployment. Replicas that stop do not count."""
    found = {}
    for name, deployment in application.deployments.items():
        states = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items()}
        coming = sum(states.get(state, 0) for state in COMING)
        found[name] = Size(states.get("RUNNING", 0), coming, deployment.status.value == SETTLED)
    return found
