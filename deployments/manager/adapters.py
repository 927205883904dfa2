"""The LoRA adapters that were loaded by HTTP: one list for all ingresses."""

from __future__ import annotations

import asyncio
import contextlib

from deployments.manager.calls import ShareAdapters
from deployments.messages import AdapterList


class LoadedAdapters:
    """Keeps the newest list. Callers that wait for a newer one get it at once."""

    def __init__(self) -> None:
        self._list = AdapterList()
        self._changed = asyncio.Event()

    async def share(self, call: ShareAdapters) -> AdapterList:
        """See the call."""
        if call.known.version > self._list.version:
            self._become(call.known)
        if call.load or call.unload:
            by_name = {adapter.name: adapter for adapter in self._list.adapters}
            for name in call.unload:
                by_name.pop(name, None)
            by_name |= {adapter.name: adapter for adapter in call.load}
            self._become(AdapterList(self._list.version + 1, tuple(by_name.values())))
        elif call.wait_s and call.known.version == self._list.version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), call.wait_s)
        return self._list

    def _become(self, newer: AdapterList) -> None:
        self._list = newer
        self._changed.set()
        self._changed = asyncio.Event()
