"""A pool of replicas, as the cluster core knows it."""

from __future__ import annotations

from typing import Protocol

from deployments.messages import SessionReport, SessionTask


class Pool(Protocol):
    """One pool of replicas. `run` reaches the replica that the task names; cancelling it ends that part."""

    async def run(self, task: SessionTask) -> SessionReport:
        """Raises ReplicaLost."""
