"""What Serve says of this replica's application, by its public `serve.status`."""

from __future__ import annotations

import asyncio
import logging

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview

logger = logging.getLogger("baton.serve")

STATUS_TIMEOUT_S = 5.0


async def own_application() -> ApplicationStatusOverview | None:
    """Its status. None where Serve does not answer in time, answers with an error, or knows it no more."""
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            status = await asyncio.to_thread(serve.status)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("Serve does not say how the application is: %r", error)
        return None
    return status.applications.get(serve.get_replica_context().app_name)
