"""The live page's snapshots: one a second for all that watch, and none while nothing does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from app.live.latencies import Latencies
from deployments.manager.calls import Manager, Overview

EVERY_S = 1.0
PATIENCE_S = 5.0
"""The longest wait for the session manager."""

logger = logging.getLogger(__name__)


class Feed:
    """`latencies`: None where there are no metrics. `model`: the name that clients ask for. `every_s`: as `EVERY_S`."""

    def __init__(self, manager: Manager, latencies: Latencies | None, model: str, every_s: float = EVERY_S) -> None:
        self._manager, self._latencies, self._model, self._every_s = manager, latencies, model, every_s
        self._newest, self._number = "", 0
        self._changed = asyncio.Condition()
        self._watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    async def snapshots(self) -> AsyncGenerator[str]:
        """JSON texts, each newer than the one before, until the caller stops or `close`. A slow caller misses some."""
        self._watchers += 1
        if not self._closed and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look(), name="baton-live")
        seen = 0
        try:
            while (seen := await self._after(seen)) and not self._closed:
                yield self._newest
        finally:
            self._watchers -= 1

    async def close(self) -> None:
        """End all watching: this process is about to stop."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        await self._wake()

    async def _after(self, seen: int) -> int:
        """Wait for a snapshot newer than number `seen`; its number."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or bool(self._newest and self._number != seen))
        return self._number

    async def _look(self) -> None:
        while self._watchers:
            self._newest = json.dumps(await self._snapshot(), separators=(",", ":"))
            await self._wake()
            await asyncio.sleep(self._every_s)
        self._newest = ""  # it would be old for the next that watches

    async def _wake(self) -> None:
        async with self._changed:
            self._number += 1
            self._changed.notify_all()

    async def _snapshot(self) -> dict[str, Any]:
        mine = {"model": self._model, "latencies": None if self._latencies is None else self._latencies.shown()}
        try:
            return {**await asyncio.wait_for(self._manager.ask(Overview()), PATIENCE_S), **mine}
        except Exception as error:  # noqa: BLE001 - the page shows any error, and the next snapshot tries again
            logger.debug("no snapshot: %r", error)
            return {"error": f"the session manager does not answer: {type(error).__name__}", **mine}
