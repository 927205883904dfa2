"""Waits that have an end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class Stop(asyncio.Event):
    """An event that ends calls. It costs a call no task."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: set[asyncio.Timeout] = set()

    def set(self) -> None:
        super().set()
        calls, self._calls = self._calls, set()
        for call in calls:
            call.reschedule(asyncio.get_running_loop().time())

    async def unless_set(self, call: Coroutine[Any, Any, T]) -> T | None:
        """The call's result. When the event comes first, the call is cancelled and the result is None."""
        if self.is_set():
            call.close()
            return None
        try:
            async with asyncio.timeout(None) as ending:
                self._calls.add(ending)
                try:
                    return await call
                finally:
                    self._calls.discard(ending)
        except TimeoutError:
            if ending.expired():
                return None
            raise
