"""The end of a batch: its journal becomes an output file and an error file, in the order of the input's lines.

Every line of the input is in one of the two. One that was not answered in time, or before the batch was cancelled, is
in the error file. The files and the batch's last status are shown by one transaction. What was written before a crash
is not shown, and another ingress writes it anew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy import Connection

from app.batches import file_rows, lease_rows, line_rows, results
from app.batches.lease_rows import Lease
from app.batches.line_reader import LineReader
from app.batches.line_request import BadLine, request_of
from app.batches.records import CANCELLED, COMPLETED, OUTPUT, Batch, Scan
from app.batches.stores import NewFile, Stores
from app.batches.tables import BATCHES
from app.batches.validation import Limits

PAGE = 200
"""Lines in memory at a time."""
PAGE_BYTES = 4 * 1024 * 1024
_LEFT = {
    CANCELLED: ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the line was not answered within the completion window"),
}

Written = tuple[int, bool, bytes]


class _Pair:
    """The two files; each is begun with its first line."""

    def __init__(self, stores: Stores, batch: Batch) -> None:
        self._stores, self._batch = stores, batch
        self._files: dict[bool, NewFile] = {}

    async def write(self, is_ok: bool, text: bytes) -> None:
        """Append a line."""
        if is_ok not in self._files:
            name = f"{self._batch.id}_{'output' if is_ok else 'error'}.jsonl"
            file = self._stores.new_file(self._batch.owner, OUTPUT, name, self._batch.asked.output_ttl_s)
            self._files[is_ok] = await NewFile.begin(self._stores, file, None)
        await self._files[is_ok].write(text + b"\n")

    async def close(self) -> None:
        for file in self._files.values():
            await file.close()

    def show(self, connection: Connection, now_s: float) -> dict[str, str | None]:
        """Show the files. Returns the batch's columns that name them."""
        for made in self._files.values():
            file_rows.finish(connection, made.file.id, made.file.bytes, None, now_s)
        ids = {is_ok: made.file.id for is_ok, made in self._files.items()}
        return {"output_file_id": ids.get(True), "error_file_id": ids.get(False)}


async def finish(stores: Stores, batch: Batch, lease: Lease, limits: Limits, outcome: str) -> Batch:
    """Bring a batch to its end. Raises LeaseLost and StoreAway; then it is done again."""
    batch = await stores.database.write(
        lambda connection: lease_rows.move(connection, lease, "finalizing", stores.clock(), outcome=outcome)
    )
    pair, left = _Pair(stores, batch), 0
    lines = _journal(stores, batch) if outcome == COMPLETED else _merged(stores, batch, limits, outcome)
    async for line, is_ok, text in lines:
        left += line == 0
        await pair.write(is_ok, text)
    await pair.close()

    def show(connection: Connection) -> Batch:
        columns = pair.show(connection, stores.clock())
        # A batch that was stopped while it was validated has no total yet.
        total = BATCHES.c.completed + BATCHES.c.failed + left
        counts = {"failed": BATCHES.c.failed + left, "total": total}
        return lease_rows.move(connection, lease, outcome, stores.clock(), **columns, **counts)

    return await stores.database.write(show)


async def _journal(stores: Stores, batch: Batch) -> AsyncIterator[Written]:
    """Every answered line, in order."""
    last = 0
    while found := await stores.database.read(lambda c: line_rows.after(c, batch.number, last, PAGE)):  # noqa: B023 - it runs before `last` changes
        for written in found:
            yield written
        last = found[-1][0]


async def _merged(stores: Stores, batch: Batch, limits: Limits, outcome: str) -> AsyncIterator[Written]:
    """Every line of the input, in order; with the number 0 those that are not answered."""
    reader = await stores.blobs.reader(batch.asked.input_file_id)
    lines = LineReader(reader.file, Scan(), limits.line_bytes)
    try:
        while window := await stores.blobs.apart(lambda: lines.window(PAGE, PAGE_BYTES)):
            first, last = window[0].number, window[-1].number
            known = await stores.database.read(lambda c: line_rows.between(c, batch.number, first, last))  # noqa: B023 - the same
            for line in window:
                if line.number in known:
                    yield (line.number, *known[line.number])
                    continue
                try:
                    request = request_of(line, batch.asked.endpoint)
                except BadLine as error:
                    yield 0, False, results.refused(line.number, error).text
                else:
                    left = results.unanswered(line.number, request.custom_id, *_LEFT[outcome])
                    yield 0, False, left.text
    finally:
        await reader.close()
