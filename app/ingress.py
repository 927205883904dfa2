"""The Serve deployment around vLLM's OpenAI server: the gateway in front, the cluster core beneath."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.middleware import Middleware

from app import access_log
from app.access.cors import with_cors
from app.access.gate import Gate
from app.access.source import keys_of
from app.api import Gateway
from app.background import Runs
from app.batches.meter import BatchMeter
from app.batches.paths import off as batches_off
from app.batches.service import Batches, batches_of
from app.held_response import ASGIApp
from app.live.feed import Feed
from app.live.latencies import Latencies, follow
from app.live.page import Page
from app.live.sessions import Sessions
from app.stored_responses import StoredResponses
from configs.schema import BatonConfig
from deployments import logs
from deployments.cluster.request_context import RequestContext
from deployments.cluster.timeline import Timelines
from deployments.engine.build import checkpoint
from deployments.errors import Unavailable
from deployments.host.garbage import starting
from deployments.host.tasks import OwnTasks
from deployments.link.ingress_side import Links
from deployments.manager.stand_in import StandIn
from deployments.messages import Handoff
from deployments.metrics.catalogue import REQUESTS
from deployments.serve.cluster_secret import cluster_secret
from deployments.serve.leaving import is_application_leaving, until_leaving
from deployments.serve.metrics import publish, registry_of
from deployments.serve.ports import Pools, ask_all, manager_client
from deployments.serve.stored import StoreClient
from deployments.tracing.start import tracer_of

if TYPE_CHECKING:
    from app.adapters import ServedAdapters
    from deployments.cluster.core import ClusterCore


class FrontendDead(Exception):
    """vLLM's frontend has stopped taking outputs. Only a new process helps."""


class Ingress:
    """One ingress process. `pools`: a handle to each pool's deployment, by name. `store`: to the store of responses."""

    def __init__(
        self,
        config: dict[str, Any],
        manager: DeploymentHandle,
        pools: dict[str, DeploymentHandle],
        store: DeploymentHandle | None = None,
    ) -> None:
        self._config = BatonConfig.model_validate(config)
        self._manager_handle = manager
        self._pools = Pools(pools)
        self._store = None if store is None else StoreClient(store)
        self._runs: Runs | None = None
        self._batches: Batches | None = None
        self._adapters: ServedAdapters | None = None
        self._metrics = registry_of(self._config)
        self._tasks = OwnTasks()
        self._feed: Feed | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve calls this once. The ingress is ready when this returns. vllm is imported in its process only."""
        with starting():
            return await self._build()

    async def _build(self) -> ASGIApp:
        from app.adapters import serve_adapters
        from app.frontend import build_server
        from deployments.cluster.core import ClusterCore
        from deployments.cluster.meter import Meter
        from deployments.cluster.recovery import Limits

        if self._config.ingress.access_log:
            access_log.start()
        replica_id = serve.get_replica_context().replica_id.unique_id
        logs.start(self._config.log_format, "ingress", replica_id, self._config.log_level)
        self._tracer = tracer_of(self._config, "ingress", replica_id)
        keys = keys_of(self._config)
        placement = self._config.placement
        handoff = Handoff.PULLED if self._config.channel.kind == "vllm" else Handoff.PUSHED
        block_size = self._config.block_size
        self._client, self._control = (manager_client(self._manager_handle, self._config) for _ in range(2))
        self._manager = StandIn(self._client, self._config, control=self._control)
        links = Links(self._pools.find, cluster_secret(self._config), placement.ingress_lease_s)
        timelines = Timelines(self._config.ingress.timelines)
        core = ClusterCore(
            self._manager,
            links,
            placement.session_timeout_s,
            block_size,
            Limits(placement.max_attempts),
            handoff,
            meter=None if self._metrics is None else Meter(self._metrics),
            timelines=timelines,
        )
        self._llm, server = await build_server(self._config, checkpoint(self._config), core, self._stored())
        self._adapters = await serve_adapters(server, self._config, self._manager)
        server.openapi()  # the document takes a moment to make, and no request should wait for it
        self._ended = asyncio.create_task(self._end_in_time(core), name="baton-drain")
        if self._metrics is not None:
            self._tasks.own(publish(self._metrics), "metrics")
        latencies = None if self._metrics is None else Latencies(self._metrics)
        if latencies is not None:
            self._tasks.own(follow(latencies), "latencies")
        self._feed = Feed(self._manager, latencies, self._config.model.name)
        self._sessions = Sessions(timelines, self._pools.spans, partial(ask_all, "ingress", "timelines"))
        batches = await self._begun_batches(server, replica_id)
        # Serve's proxy answers with the request id itself.
        gateway = Gateway(
            server,
            self._config.ingress,
            self._manager,
            echo_request_id=False,
            observe=self._count,
            max_queued_requests=placement.max_queued_requests,
            page=Page(self._feed, self._sessions),
            gate=None if keys is None else Gate(keys, self._config.ingress.admin_key),
            tracer=self._tracer,
            batches=batches,
        )
        gateway.counters["without_manager"] = self._manager.counters
        return with_cors(gateway, self._config.ingress.allowed_origins)

    def _stored(self) -> Middleware | None:
        """What stores responses; None where nothing does."""
        ingress = self._config.ingress
        if self._store is None:
            return None
        self._runs = Runs(self._store, ingress.max_ongoing_requests)
        return Middleware(StoredResponses, store=self._store, runs=self._runs, max_body_bytes=ingress.max_body_bytes)

    async def _begun_batches(self, server: ASGIApp, holder: str) -> ASGIApp:
        """What answers for files and batches, and runs these from now on."""
        meter = None if self._metrics is None else BatchMeter(self._metrics)
        noted = (lambda results: None) if meter is None else meter.noted
        self._batches = batches_of(self._config, server, holder, self._count, noted)
        if self._batches is None:
            return batches_off
        await self._batches.start()
        if meter is not None:
            self._tasks.own(meter.follow(self._batches.runner), "batches-metrics")
        return self._batches.routes

    async def _end_in_time(self, core: ClusterCore) -> None:
        """End every answer `ingress.drain_s` seconds after Serve begins to stop this ingress.

        Serve sends no new request to an ingress that it stops, and waits for its answers for a while.
        """
        await until_leaving()
        if self._feed is not None:
            await self._feed.close()
        if self._batches is not None:
            await self._batches.stop_running()
        if await is_application_leaving():
            core.refuse(Unavailable("this server is being stopped"))
            if self._runs is not None:  # the store goes too, and nothing could show what they come to
                await self._runs.close()
        await asyncio.sleep(self._config.ingress.drain_s)
        core.end_all(Unavailable("this server is being stopped, and the answer takes longer than it may"))

    def _count(self, context: RequestContext, status: int) -> None:
        if self._metrics is not None:
            labels = {"mode": ",".join(sorted(context.modes)), "rule": ",".join(sorted(context.rules))}
            self._metrics.value(REQUESTS, status=str(status), **labels).add()

    async def timelines(self, name: str) -> dict[str, Any] | None:
        """What this ingress has of a request, or of a session; another ingress asks. See `Sessions.here`."""
        return await self._sessions.here(name)

    def check_health(self) -> None:
        """Serve calls this, and replaces the process when this raises."""
        if self._llm.errored:
            raise FrontendDead("the frontend no longer takes engine outputs")

    async def __del__(self) -> None:
        """Serve calls this once, when the last request is over. Background responses may still run."""
        if self._runs is not None:
            await self._runs.ended()  # at the latest when `_end_in_time` ends every answer
        if self._batches is not None:
            await self._batches.close()
        if llm := getattr(self, "_llm", None):
            llm.shutdown()
            if self._adapters is not None:
                self._adapters.shutdown()
            self._manager.shutdown()
            self._client.shutdown()
            self._control.shutdown()
            self._ended.cancel()
            self._tasks.cancel()
            if self._tracer is not None:
                await self._tracer.close()
