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


async def unless(event: asyncio.Event, call: Coroutine[Any, Any, T]) -> T | None:
    """The call's result. When the event comes first, the call is cancelled and the result is None."""
    asked, come = asyncio.ensure_future(call), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({asked, come}, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        for waiting in (asked, come):
            waiting.cancel()
