"""The replicas that an engine may exchange KV with."""

from __future__ import annotations

import asyncio

from deployments.engine.protocol import Engine
from deployments.messages import Peers
from deployments.replica.timings import Timings


class Introductions:
    """Introduces the engine to its peers before a request needs them, and forgets peers that are gone."""

    def __init__(self, engine: Engine, timings: Timings) -> None:
        self._engine, self._timings = engine, timings
        self._peers = Peers(0, ())
        self._has_news = asyncio.Event()

    @property
    def version(self) -> int:
        """The version of the list of peers that is known here."""
        return self._peers.version

    def learn(self, peers: Peers) -> None:
        """The manager has named the peers."""
        self._peers = peers
        self._has_news.set()

    async def meet_loop(self) -> None:
        """Pass changes of the peers on to the engine. Where the engine was busy, try again."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            try:
                await self._engine.meet(self._peers.endpoints)
            except TimeoutError:  # the engine is in a long step
                self._has_news.set()
                await asyncio.sleep(self._timings.heartbeat_s)
