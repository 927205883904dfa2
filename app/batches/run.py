"""One batch that this ingress holds, from where it is to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.batches import batch_rows, lease_rows, line_rows, outputs
from app.batches.journal import Journal
from app.batches.lease_rows import Lease
from app.batches.line_call import LineCaller
from app.batches.line_order import in_mixed_order
from app.batches.line_reader import LineReader
from app.batches.line_request import LineRequest, request_of
from app.batches.line_rows import Result
from app.batches.progress import Progress, Window
from app.batches.records import CANCELLED, CANCELLING, COMPLETED, FAILED, VALIDATING, Batch
from app.batches.slots import Slots
from app.batches.stores import Stores
from app.batches.validation import BadFile, Limits, validate

WINDOW_LINES, WINDOW_BYTES = 1024, 8 * 1024 * 1024
"""Lines are ordered (`line_order`) within so many, and within so many bytes."""


@dataclass(frozen=True)
class Parts:
    """What every batch of an ingress is run with. `noted`: is called with lines that were answered."""

    stores: Stores
    caller: LineCaller
    slots: Slots
    limits: Limits
    noted: Callable[[Sequence[Result]], None] = lambda results: None


class BatchRun:
    """`go` runs it; nothing is left of it then. It may end at any point, and begin again elsewhere."""

    def __init__(self, batch: Batch, lease: Lease, parts: Parts) -> None:
        self.batch, self.lease = batch, lease
        self.progress = Progress(batch.scan)
        self._parts, self._stores = parts, parts.stores
        self._outcome = batch.outcome or (CANCELLED if batch.status == CANCELLING else "")
        self._working: asyncio.Task[str] | None = None

    def stop(self, outcome: str) -> None:
        """Answer no more lines: the batch ends as it is, with this status. Idempotent."""
        if not self._outcome and self._working is not None:
            self._outcome = outcome
            self._working.cancel()

    async def go(self) -> Batch:
        """Bring the batch to its end. Raises LeaseLost and StoreAway, in groups of exceptions, too."""
        outcome = self._outcome or await self._worked()
        if outcome != FAILED:
            self.batch = await outputs.finish(self._stores, self.batch, self.lease, self._parts.limits, outcome)
        return self.batch

    async def _worked(self) -> str:
        """The status in which the batch ends, once its lines are answered or it was stopped."""
        working = self._working = asyncio.create_task(self._work(), name=f"baton-{self.batch.id}-lines")
        try:
            await asyncio.wait({working})
        finally:
            working.cancel()
            await asyncio.wait({working})
        if not working.cancelled():
            self._outcome = working.result()
        return self._outcome

    async def _work(self) -> str:
        try:
            if self.batch.status == VALIDATING:
                self.batch = await validate(self._stores, self.batch, self.lease, self._parts.limits)
        except BadFile as error:
            await self._fail(error)
            return FAILED
        journal = Journal(self._stores.database, self.lease, self._parts.noted)
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(journal.run())
            await self._answer(journal)
            writing.cancel()
        return COMPLETED

    async def _fail(self, error: BadFile) -> None:
        columns = {"errors": batch_rows.errors_text([error.shown()])}
        now_s = self._stores.clock()
        self.batch = await self._stores.database.write(
            lambda connection: lease_rows.move(connection, self.lease, FAILED, now_s, **columns)
        )

    async def _answer(self, journal: Journal) -> None:
        """Answer every line that has no answer."""
        scan = self.progress.scan
        reader = await self._stores.blobs.reader(self.batch.asked.input_file_id, scan.offset)
        lines = LineReader(reader.file, scan, self._parts.limits.line_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                while (requests := await self._window(lines)) is not None:
                    window = self.progress.begin(lines.scan, len(requests))
                    for request in in_mixed_order(requests):
                        await self._parts.slots.open_lines.acquire()
                        line = group.create_task(self._line(request, journal, window))
                        line.add_done_callback(lambda _: self._parts.slots.open_lines.release())
        finally:
            await reader.close()

    async def _window(self, lines: LineReader) -> list[LineRequest] | None:
        """The requests of the next window that have no answer; None at the end of the file."""
        found = await self._stores.blobs.apart(lambda: lines.window(WINDOW_LINES, WINDOW_BYTES))
        if not found:
            return None
        number, first, last = self.batch.number, found[0].number, found[-1].number
        answered = await self._stores.database.read(lambda c: line_rows.answered(c, number, first, last))
        return [request_of(line, self.batch.asked.endpoint) for line in found if line.number not in answered]

    async def _line(self, request: LineRequest, journal: Journal, window: Window) -> None:
        result = await self._parts.caller.result(self.batch, request)
        await journal.add(result)
        self.progress.answered(window)
