"""The named points of a session's life at which a fault may be made to happen."""

from __future__ import annotations

import asyncio

POINTS = ("opening", "placed", "before_offer", "writing", "landing", "decoding", "closing")
"""Asked; placed, a replica is about to be called; on a decode engine that has offered no blocks yet; KV is being
written; it is all there; a token was computed; a replica's part is over."""


class Points:
    """Whoever waits for a point learns on which replica a session has come to it next. For one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited: dict[str, asyncio.Future[str]] = {}

    def reached(self, point: str, replica_id: str = "") -> None:
        """A session has come to a point. From any thread; costs next to nothing while nobody waits."""
        if point in self._awaited:
            self._loop.call_soon_threadsafe(self._tell, point, replica_id)

    def _tell(self, point: str, replica_id: str) -> None:
        awaited = self._awaited.pop(point, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(replica_id)

    async def next(self, point: str, wait_s: float) -> str:
        """The replica where a session comes to the point next; "" where none has a part in it, or after `wait_s`."""
        awaited = self._awaited.setdefault(point, self._loop.create_future())
        done, _ = await asyncio.wait({awaited}, timeout=wait_s)
        return awaited.result() if done else ""
