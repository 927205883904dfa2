"""The Serve side of a replica: its identity comes from Serve and Ray. Everything else is `replica.Replica`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from configs.schema import BatonConfig, role_of
from deployments import logs
from deployments.engine.build import build_engine
from deployments.engine.protocol import EngineError, Identity, WorkerSpans
from deployments.host.garbage import starting
from deployments.host.tasks import OwnTasks
from deployments.link.replica_side import LinkServer
from deployments.messages import Locate, Role
from deployments.replica.drain import drain
from deployments.replica.meter import ReplicaMeter
from deployments.replica.replica import Replica
from deployments.replica.spans import TracedRuns
from deployments.serve.cluster_secret import cluster_secret
from deployments.serve.leaving import is_application_leaving, until_leaving
from deployments.serve.metrics import publish, registry_of
from deployments.serve.ports import manager_client
from deployments.serve.scaling import SESSIONS
from deployments.tracing.start import tracer_of

logger = logging.getLogger("baton.replica")


class ServeReplica:
    """A replica of one pool. Serve shows the deployment as starting until the engine is loaded."""

    _drained: asyncio.Task[None] | None = None

    async def __init__(self, config: dict[str, Any], pool: str, manager: DeploymentHandle) -> None:  # type: ignore[misc]
        self._tasks = OwnTasks()
        baton = BatonConfig.model_validate(config)
        identity = Identity(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            pool=pool,
            role=Role(role_of(pool)),
            node_id=ray.get_runtime_context().get_node_id(),
            host=get_node_ip_address(),
            strict=baton.pools[pool].strict,
        )
        logs.start(baton.log_format, pool, identity.replica_id, baton.log_level)
        with starting():
            secret = cluster_secret(baton)
            engine = build_engine(baton, identity, secret)
            self._manager = manager_client(manager, baton)
            self._replica = Replica(identity, engine, self._manager, baton.placement)
            self._runs = TracedRuns(self._replica, pool)
            runs = self._replica if baton.tracing is None else self._runs
            self._links = LinkServer(runs, secret, baton.placement.ingress_lease_s)
            await self._links.start(identity.host)
            await self._replica.start()
        # The engine's processes are forked before there is a thread that sends spans.
        self._runs.tracer = tracer_of(baton, pool, identity.replica_id)
        self._drained = asyncio.create_task(self._drain(baton.placement.drain_s), name="baton-drain")
        if (registry := registry_of(baton, pool=pool)) is not None:
            self._tasks.own(publish(registry, ReplicaMeter(registry, self._replica).collect), "metrics")

    async def _drain(self, timeout_s: float) -> None:
        """Drain, then end what is still open while Serve waits for it: so it fails at once, and is not cut off."""
        await until_leaving()
        try:
            self._replica.check_health()
            await drain(self._replica, timeout_s, is_application_leaving)
        except EngineError as error:
            logger.warning("there is nothing to wait for: %s", error)
        await self._stop()

    async def _stop(self) -> None:
        await self._replica.stop()
        self._links.close()
        self._tasks.cancel()
        if self._runs.tracer is not None:
            await self._runs.tracer.close()

    async def address(self, asked: Locate) -> str:
        """Where ingresses connect to this replica, to run sessions on it."""
        return self._links.address

    async def move_out(self, session_ids: tuple[str, ...] | None = None) -> int:
        """Let sessions move to other replicas; see `Replica.move_out`."""
        return self._replica.move_out(session_ids)

    async def counters(self) -> dict[str, float]:
        """The engine's and the KV channel's counters."""
        return await self._replica.counters()

    async def spans(self, asked: Locate, session_ids: list[str]) -> list[WorkerSpans]:
        """What the KV channels of this replica did for these sessions."""
        return await self._replica.spans(session_ids)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this where the pool scales by itself. It does not see sessions, so they are told."""
        return {SESSIONS: self._replica.open_runs}

    def check_health(self) -> None:
        """Serve calls this. When it raises, Serve replaces the replica."""
        self._replica.check_health()

    async def __del__(self) -> None:
        """Serve calls this once, when the replica's calls are over. KV may still be in transfer."""
        if self._drained is not None:
            await self._drained
        else:
            await self._stop()
        self._manager.shutdown()
