"""Notes answered lines durably. Lines that are answered while a transaction runs share the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from app.batches import line_rows
from app.batches.database import Database
from app.batches.lease_rows import Lease
from app.batches.line_rows import PIECE, Result
from deployments.errors import StoreAway

AGAIN_S = 0.5

logger = logging.getLogger(__name__)


class Journal:
    """The journal of one batch, which this ingress holds. `run` it beside what adds to it."""

    def __init__(
        self, database: Database, lease: Lease, noted: Callable[[Sequence[Result]], None] = lambda results: None
    ) -> None:
        self._database, self._lease, self._noted = database, lease, noted
        self._news = asyncio.Event()
        self._waiting: list[tuple[Result, asyncio.Future[None]]] = []

    async def add(self, result: Result) -> None:
        """Returns when the line is on disk."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, done))
        self._news.set()
        await done

    async def run(self) -> None:
        """Write, until this is cancelled. Raises LeaseLost. While the database is away, what is answered waits."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:PIECE], self._waiting[PIECE:]
                await self._write([result for result, _ in batch])
                for _, done in batch:
                    if not done.done():
                        done.set_result(None)

    async def _write(self, results: list[Result]) -> None:
        def write(connection: Connection) -> None:
            line_rows.add(connection, self._lease, results)

        while True:
            try:
                await self._database.write(write)
            except StoreAway as error:
                logger.warning("batch %d: %d answered lines wait: %s", self._lease.number, len(results), error)
                await asyncio.sleep(AGAIN_S)
            else:
                self._noted(results)
                return
