"""The named points of a session's life at which a fault may be made to happen."""

from __future__ import annotations

import asyncio

POINTS = ("opening", "placed", "before_offer", "writing", "landing", "decoding", "closing")
"""`opening`: the request is asked. `placed`: it is placed, and a replica is about to be called. `before_offer`: it is
on a decode engine that has offered no blocks yet. `writing`: its KV is being written. `landing`: all of its KV is
there. `decoding`: a token was computed. `closing`: a replica's part is over."""


class Points:
    """Tells a waiting fault on which replica a session next reaches its point. For one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited: dict[str, asyncio.Future[str]] = {}

    def reached(self, point: str, replica_id: str = "") -> None:
        """A session has reached a point. Any thread may call this. It costs next to nothing while no fault waits."""
        if point in self._awaited:
            self._loop.call_soon_threadsafe(self._tell, point, replica_id)

    def _tell(self, point: str, replica_id: str) -> None:
        awaited = self._awaited.pop(point, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(replica_id)

    async def next(self, point: str, wait_s: float) -> str:
        """The replica where a session next reaches the point. "" where none has a part in it, or after `wait_s`."""
        awaited = self._awaited.setdefault(point, self._loop.create_future())
        done, _ = await asyncio.wait({awaited}, timeout=wait_s)
        return awaited.result() if done else ""
