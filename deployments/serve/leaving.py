"""Tells whether Serve is stopping this process's replica: for a scale-down, an update, or the whole application's end.

Serve has no public hook for the beginning of a stop. `__del__` comes at its end, when no call is open any more. So this
module reads the private flag of Serve's replica, which costs nothing.
"""

from __future__ import annotations

import asyncio

from ray._private.worker import global_worker
from ray.serve.schema import ApplicationStatus

from deployments.serve.own_application import own_application

LOOK_S = 0.1


def is_leaving() -> bool:
    """Whether Serve has begun to stop this replica. Raises AttributeError or KeyError when that cannot be known."""
    actor = global_worker.actors[global_worker.actor_id]
    leaving: bool = actor._replica_impl._shutting_down
    return leaving


async def until_leaving() -> None:
    """Return soon after Serve has begun to stop this replica."""
    while not is_leaving():  # noqa: ASYNC110 - nothing tells us
        await asyncio.sleep(LOOK_S)


async def is_application_leaving() -> bool:
    """Whether Serve deletes the whole application, so that no session can go on elsewhere.

    False where Serve does not say.
    """
    application = await own_application()
    return application is not None and application.status is ApplicationStatus.DELETING
