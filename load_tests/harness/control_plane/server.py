"""The real ingress application over a control plane: the gateway, vLLM's server, a cluster core."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from app.access.gate import Gate
from app.api import Gateway
from app.batches.paths import off as batches_off
from app.batches.service import batches_of
from app.frontend import ClusterLLM, build_server
from app.held_response import ASGIApp
from configs.schema import BatonConfig, IngressConfig
from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, DEFAULT_SOURCE, resolve
from deployments.cluster.core import ClusterCore
from deployments.cluster.recovery import Limits
from deployments.manager.stand_in import StandIn
from load_tests.harness.control_plane.fleet import PATIENCE_S, until
from load_tests.harness.control_plane.in_process import InProcess
from load_tests.harness.control_plane.ingress import core_over
from load_tests.harness.control_plane.ports import ManagerLine


@dataclass(frozen=True)
class Served:
    """An ingress. `gateway`: its ASGI application. `llm`: vLLM's frontend. `core`: the cluster core beneath it.

    `app`: vLLM's server, which the gateway is around. `manager`: what the gateway asks.
    """

    gateway: Gateway
    llm: ClusterLLM
    core: ClusterCore
    app: ASGIApp
    manager: StandIn

    def gated(self, gate: Gate, config: IngressConfig) -> Gateway:
        """One more gateway around the same server, which asks for API keys."""
        return Gateway(self.app, config, self.manager, gate=gate)

    async def settle(self, cluster: InProcess) -> None:
        """Wait until nothing is open in it or below it. Raises AssertionError, or TimeoutError."""

        async def nothing() -> bool:
            return not self.core.open_sessions and not self.llm.get_num_unfinished_requests()

        await until(nothing)
        await cluster.settle()


@contextlib.asynccontextmanager
async def served(
    cluster: InProcess, config: BatonConfig, around_lines: Callable[[ASGIApp], ASGIApp] = lambda app: app
) -> AsyncIterator[Served]:
    """An ingress of its own over the replicas of a control plane in this process.

    `config`: that of the control plane. `around_lines`: makes what lines of batches ask out of vLLM's server. Nothing
    of the ingress runs any more at the end.
    """
    core, manager = core_over(
        config, cluster.fleet, ManagerLine(cluster.manager_port), Limits(config.placement.max_attempts)
    )
    async with serving(config, core, manager, around_lines) as server:
        yield server


@contextlib.asynccontextmanager
async def serving(
    config: BatonConfig,
    core: ClusterCore,
    manager: StandIn,
    around_lines: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> AsyncIterator[Served]:
    """An ingress over a cluster core, with the model that comes with the tests. It runs batches where these are on.

    It shuts the manager's stand-in down at the end. Nothing of the ingress runs any more then.
    """
    llm, app = await build_server(config, str(resolve(DEFAULT_SOURCE, DEFAULT_CACHE_DIR)), core)
    batches = batches_of(config, around_lines(app), f"harness {os.getpid()}")
    gateway = Gateway(
        app,
        config.ingress,
        manager,
        max_queued_requests=config.placement.max_queued_requests,
        batches=batches_off if batches is None else batches.routes,
    )
    if batches is not None:
        await batches.start()
    try:
        yield Served(gateway, llm, core, app, manager)
    finally:
        if batches is not None:
            await batches.close()
        llm.shutdown()  # the core's, too
        manager.shutdown()
        assert llm.output_handler is not None
        await asyncio.wait([llm.output_handler], timeout=PATIENCE_S)
