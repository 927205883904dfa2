"""The Serve side of the session manager. It has a process of its own, so it may decide when garbage is collected."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from ray import serve
from ray.util import get_node_ip_address

from configs.schema import BatonConfig
from deployments import logs
from deployments.host.garbage import Collector
from deployments.host.tasks import OwnTasks
from deployments.manager.calls import A, Call, Open, Report
from deployments.manager.manager import LISTEN_S, SessionManager
from deployments.manager.server import ManagerServer
from deployments.manager.spans import traced
from deployments.manager.trace_file import TraceFile
from deployments.manager.traffic import Traffic
from deployments.serve.cluster_secret import cluster_secret
from deployments.serve.leaving import until_leaving
from deployments.serve.metrics import publish, registry_of
from deployments.serve.scaling import MANAGER, TARGET
from deployments.serve.sizes import sizes
from deployments.tracing.start import tracer_of


class ServeSessionManager(SessionManager):
    """See `SessionManager`."""

    async def __init__(self, config: BatonConfig) -> None:  # type: ignore[misc]
        replica_id = serve.get_replica_context().replica_id.unique_id
        logs.start(config.log_format, MANAGER, replica_id)
        self._tracer = tracer_of(config, MANAGER, replica_id)
        self._trace = TraceFile(config.trace, config.block_size) if config.trace else None
        traffic = Traffic(self._trace.put, config.placement.default_class) if self._trace else None
        super().__init__(config, listen_s=LISTEN_S, traffic=traffic)
        self._collector = Collector()
        self._server = ManagerServer(self, cluster_secret(config))
        await self._server.start(get_node_ip_address())
        self._tasks = OwnTasks()
        if self.scaling is not None:
            self._tasks.own(self.plan(sizes), "scaling")
        if (registry := registry_of(config, policy=config.placement.policy)) is not None:
            self._tasks.own(publish(registry, self.meter(registry).collect), "metrics")
        self._retired = asyncio.create_task(self._retire(), name="baton-retire")

    async def address(self) -> str:
        """The address that ingresses and replicas connect to (see `ManagerClient`). "" once the manager retires."""
        return self._server.address

    async def _retire(self) -> None:
        await until_leaving()
        self._tasks.cancel()
        await self._server.retire()
        self._traffic.end()
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)
        if self._tracer is not None:
            await self._tracer.close()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this where the configuration has `scaling`: the replicas that each pool should have.

        A manager that retires says nothing: the next one plans.
        """
        if self.scaling is None or not self._server.address:
            return {}
        return {f"{TARGET}{pool}": float(replicas) for pool, replicas in self.scaling.told().items()}

    async def ask(self, call: Call[A]) -> A:
        """See `SessionManager.ask`. Garbage is collected at reports, because they come all the time and no client waits
        for their answers.
        """
        if isinstance(call, Report):
            self._collector.tick(time.monotonic())
        elif self._tracer is not None and isinstance(call, Open) and call.request.traceparent:
            return cast(A, await traced(self._tracer, call, super().ask(call)))
        return await super().ask(call)

    async def __del__(self) -> None:
        """Serve calls this once, at the end of the stop."""
        await self._retired
