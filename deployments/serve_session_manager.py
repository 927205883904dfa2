"""The Serve side of the session manager: a process of its own, so that it may decide when garbage is collected."""

from __future__ import annotations

import time

from configs.schema import BatonConfig
from deployments.collector import Collector
from deployments.messages import ReplicaSnapshot, ReportAnswer
from deployments.session_manager import SessionManager


class ServeSessionManager(SessionManager):
    """See `SessionManager`."""

    def __init__(self, config: BatonConfig) -> None:
        super().__init__(config)
        self._collector = Collector()

    async def report(self, snapshot: ReplicaSnapshot) -> ReportAnswer:
        """See `SessionManager.report`. Reports come all the time, and nobody waits for their answer."""
        self._collector.tick(time.monotonic())
        return await super().report(snapshot)
