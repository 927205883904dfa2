"""Finds what would otherwise hang: an engine that makes no progress, and sessions whose ingress is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time

from configs.schema import PlacementConfig
from deployments.engine.protocol import Engine, EngineError
from deployments.output_stream import OutputSender
from deployments.replica.parts import Parts
from deployments.replica.timings import Timings


class Watch:
    """Two loops, which the replica runs as tasks."""

    def __init__(
        self, engine: Engine, sender: OutputSender, parts: Parts, config: PlacementConfig, timings: Timings
    ) -> None:
        self._engine, self._sender, self._parts = engine, sender, parts
        self._config, self._timings = config, timings
        self._progressed_s = time.monotonic()

    def progressed(self) -> None:
        """The engine has made a step, or has work after a time without any."""
        self._progressed_s = time.monotonic()

    async def hang_loop(self) -> None:
        """Ask an engine that has sessions but makes no step whether it still runs. It answers between two steps.

        Raises EngineError after `hang_timeout_s` with neither a step nor an answer.
        """
        limit_s = self._config.hang_timeout_s
        while True:
            await asyncio.sleep(min(self._timings.heartbeat_s, limit_s / 4))
            if not self._parts.open or time.monotonic() - self._progressed_s < limit_s / 2:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s / 4):
                    await self._engine.counters()
                self.progressed()
            if time.monotonic() - self._progressed_s > limit_s:
                raise EngineError(f"the engine has not moved for {limit_s:g} s")

    async def lease_loop(self) -> None:
        """End the parts of an ingress that is gone. Serve does not cancel a call when the caller's process dies."""
        while True:
            await asyncio.sleep(min(self._timings.heartbeat_s, self._config.ingress_lease_s / 4))
            self._parts.orphan(self._sender.drop_gone())
