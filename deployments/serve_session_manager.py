"""The Serve side of the session manager: a process of its own, so that it may decide when garbage is collected."""

from __future__ import annotations

import asyncio
import time

from configs.schema import BatonConfig
from deployments.collector import Collector
from deployments.messages import ReplicaSnapshot, ReportAnswer
from deployments.serve_leaving import until_leaving
from deployments.session_manager import LISTEN_S, SessionManager


class ServeSessionManager(SessionManager):
    """See `SessionManager`."""

    async def __init__(self, config: BatonConfig) -> None:  # type: ignore[misc]
        super().__init__(config, listen_s=LISTEN_S)
        self._collector = Collector()
        self._left = asyncio.create_task(self._leave(), name="baton-leave")

    async def _leave(self) -> None:
        await until_leaving()
        self.leave()

    async def report(self, snapshot: ReplicaSnapshot) -> ReportAnswer:
        """See `SessionManager.report`. Reports come all the time, and nobody waits for their answer."""
        self._collector.tick(time.monotonic())
        return await super().report(snapshot)
