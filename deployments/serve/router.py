"""The Serve request router: it delivers a call to the replica that the call names, or fails the call.

Serve's own routing loop finds *a* replica for *some* waiting request. It matches the two by a request id that
all calls made within one HTTP request share. It retries on other replicas, and it waits for ever while a
deployment has no replica. A call that names its replica needs that replica, one try and an end. So, like Serve's own
`ray.serve.experimental.capacity_queue_router`, this router answers in the caller's coroutine, and leaves the
loop to calls without a placement.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.errors import ReplicaGone, ReplicaLost
from deployments.messages import Locate

APPEAR_S = 5.0
"""The longest time that a call waits for a new replica. A new replica may reach the session manager before Serve's
handles know of it."""
GONE_KEPT = 64
"""The maximum number of removed replicas kept, the newest. They are still called for sessions that leave them."""


class PlacedRouter(RequestRouter):
    """Routes a call whose first positional argument is a Locate to its `replica_id`. Other calls go anywhere.

    A replica that Serve has taken out runs until its sessions are over. It is found only for a session that leaves it
    and that it hands over (`hands_over`).

    A named call fails at once with ReplicaLost when its replica has refused it or has died during it, and with
    ReplicaGone when Serve has taken the replica out. It fails with ReplicaLost after `appear_s` (a request router
    argument) when Serve has never known the replica.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._appear_s = APPEAR_S
        self._seen: set[ReplicaID] = set()
        self._gone: dict[ReplicaID, RunningReplica] = {}
        self._changed = asyncio.Event()

    def initialize_state(self, appear_s: float = APPEAR_S, **kwargs: Any) -> None:
        """Serve calls this with `request_router_kwargs`."""
        if kwargs:
            raise ValueError(f"PlacedRouter does not know {sorted(kwargs)}")
        self._appear_s = appear_s

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this with all replicas when one is added or removed."""
        before = dict(self.curr_replicas)
        super().update_replicas(replicas)
        self._gone |= {each: replica for each, replica in before.items() if each not in self.curr_replicas}
        for oldest in list(self._gone)[:-GONE_KEPT]:
            del self._gone[oldest]
        self._seen.update(self.curr_replicas)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """For calls without a task: all candidates. Serve then picks the one with the shortest queue."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve calls this for the replica of one call, and again (`is_retry`) when that replica did not take it."""
        asked = pending_request.args[0] if pending_request.args else None
        if not isinstance(asked, Locate):
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry:
            raise ReplicaLost(f"replica {asked.replica_id} refused session {asked.session_id} or died under it")
        return await self._named(asked)

    async def _named(self, asked: Locate) -> RunningReplica:
        replica_id = ReplicaID(unique_id=asked.replica_id, deployment_id=self._deployment_id)
        try:
            async with asyncio.timeout(self._appear_s):
                while (replica := self.curr_replicas.get(replica_id)) is None:
                    if asked.hands_over and (leaving := self._gone.get(replica_id)) is not None:
                        return leaving
                    if replica_id in self._seen:
                        raise ReplicaGone(f"replica {asked.replica_id} of session {asked.session_id} is gone")
                    await self._changed.wait()
        except TimeoutError:
            raise ReplicaLost(
                f"Serve knows no replica {asked.replica_id} of {self._deployment_id.name}, "
                f"where session {asked.session_id} was placed"
            ) from None
        return replica
