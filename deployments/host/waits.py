"""Waits that end: for an event, or for a call as long as an event does not come first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, so long at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def unless(event: asyncio.Event, call: Coroutine[Any, Any, T]) -> T | None:
    """What a call answers; None when the event came before, and the call is cancelled."""
    asked, come = asyncio.ensure_future(call), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({asked, come}, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        for waiting in (asked, come):
            waiting.cancel()
