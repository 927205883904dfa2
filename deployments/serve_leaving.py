"""Whether Serve is taking this process's replica out: scaled down, updated, or shut down.

Serve has no public hook for the beginning of that; `__del__` comes at its end, when no call is open any more. So the
flag that Serve's replica keeps for itself is looked at, which costs nothing.
"""

from __future__ import annotations

import asyncio

from ray._private.worker import global_worker

LOOK_S = 0.1


def is_leaving() -> bool:
    """Whether Serve has begun to stop this replica. Raises AttributeError or KeyError where that cannot be known."""
    actor = global_worker.actors[global_worker.actor_id]
    leaving: bool = actor._replica_impl._shutting_down
    return leaving


async def until_leaving() -> None:
    """Return soon after Serve has begun to stop this replica."""
    while not is_leaving():  # noqa: ASYNC110 - nothing tells us
        await asyncio.sleep(LOOK_S)
