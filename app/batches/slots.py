"""The places for lines in one ingress, over all of its batches, in the order in which lines ask."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.batches.room import Room


class Slots:
    """`most`: lines at once, and lines that may wait for a place. How many run is for `Room` to say."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.room = Room(most)
        self.open_lines = asyncio.Semaphore(most)
        """A line has one of these from when it is begun until it is noted, so no more of them are in memory."""
        self._clock = clock
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._alarm: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place, as soon as there is one."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._call()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def answered(self) -> None:
        """A line was let in and has its answer."""
        self.room.answered()

    def refused(self, retry_after_s: float) -> None:
        """A line was not let in."""
        self.room.refused(self._clock(), retry_after_s)

    def close(self) -> None:
        """Forget the alarm, which is all that may be left."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _leave(self) -> None:
        self._running -= 1
        self._call()

    def _call(self) -> None:
        """Give away what places there are."""
        shut_s = self.room.shut_until_s - self._clock()
        while self._waiting and shut_s <= 0 and self._running < self.room.places:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)
        if self._waiting and shut_s > 0 and (self._alarm is None or self._alarm.cancelled()):
            self._alarm = asyncio.get_running_loop().call_later(shut_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._call()
