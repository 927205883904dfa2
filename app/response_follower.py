"""The events of a background response that may run in another ingress, as the store has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from app.errors import BadResponseRequest
from app.response_events import failed_event, is_failure, response_from
from app.timings import Timings
from deployments.errors import StoreAway
from deployments.stored.calls import RUNNING, Events, EventsSoFar, Store


class Follower:
    """Reads the events of one response from number `first` on."""

    def __init__(self, store: Store, response_id: str, owner: str, first: int, timings: Timings) -> None:
        self._store, self._timings = store, timings
        self._response_id, self._owner, self._next = response_id, owner, max(0, first)
        self._found: EventsSoFar | None = None

    async def begin(self) -> bool:
        """False where there is no such response. Raises StoreAway, and BadResponseRequest where it has no events."""
        self._found = await self._ask()
        if self._found is not None and self._found.events is None:
            raise BadResponseRequest("only a background response that was made with stream: true has events")
        return self._found is not None

    async def events(self) -> AsyncIterator[bytes]:
        """The events that are there, and then those that come. The stream breaks off where the store loses them."""
        last = b""
        while (found := self._found) is not None and found.events is not None:
            for event in found.events:
                last = event
                yield event
            self._next += len(found.events)
            if found.stored.status not in RUNNING:
                if found.stored.reason and not is_failure(last):
                    yield failed_event(response_from(found.stored), self._next)
                return
            await asyncio.sleep(self._timings.report_s / 2)
            self._found = await self._again()

    async def _again(self) -> EventsSoFar | None:
        """The next events. A store that is away for longer than it may be has lost them."""
        try:
            async with asyncio.timeout(self._timings.store_s):
                while True:
                    try:
                        return await self._ask()
                    except StoreAway:
                        await asyncio.sleep(self._timings.report_s)
        except TimeoutError:
            return None

    async def _ask(self) -> EventsSoFar | None:
        return await self._store.ask(Events(self._response_id, self._owner, self._next))
