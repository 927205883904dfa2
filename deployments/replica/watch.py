"""Finds an engine that would otherwise hang: it has sessions, and makes no progress."""

from __future__ import annotations

import asyncio
import contextlib
import time

from configs.schema import PlacementConfig
from deployments.engine.protocol import Engine, EngineError
from deployments.replica.parts import Parts
from deployments.replica.timings import Timings


class Watch:
    """A loop, which the replica runs as a task."""

    def __init__(self, engine: Engine, parts: Parts, config: PlacementConfig, timings: Timings) -> None:
        self._engine, self._parts, self._config, self._timings = engine, parts, config, timings
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
