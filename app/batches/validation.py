"""The first pass over an input file: every line is looked at once, and one that can be no request gets its error.

What is kept of a line until the end of the pass is 12 bytes: its number, and a hash of its `custom_id`, by which lines
with the same one are found.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from app.batches import lease_rows, line_rows, results
from app.batches.lease_rows import Lease
from app.batches.line_reader import Line, LineReader
from app.batches.line_request import BadLine, request_of
from app.batches.line_rows import Result
from app.batches.records import Batch, Scan
from app.batches.stores import Stores

WINDOW_LINES, WINDOW_BYTES = 1000, 4 * 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """Of one input file: its lines, and the bytes of each."""

    lines: int
    line_bytes: int


class BadFile(Exception):
    """No line of the file can be answered. `code`: for the batch's `errors`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def shown(self) -> dict[str, Any]:
        """An entry of the batch's `errors`."""
        return {"code": self.code, "message": str(self), "param": None, "line": None}


@dataclass
class _Seen:
    """The lines so far. `numbers`, `hashes`: of those that are requests."""

    total: int = 0
    numbers: array[int] = field(default_factory=lambda: array("I"))
    hashes: array[int] = field(default_factory=lambda: array("Q"))

    def take(self, lines: Sequence[Line], endpoint: str) -> list[Result]:
        """The errors of the next lines."""
        bad = []
        for line in lines:
            try:
                request = request_of(line, endpoint)
            except BadLine as error:
                bad.append(results.refused(line.number, error))
                continue
            self.numbers.append(line.number)
            self.hashes.append(xxhash.xxh3_64_intdigest(request.custom_id.encode()))
        self.total += len(lines)
        return bad

    def repeated(self) -> set[int]:
        """The numbers of lines with a `custom_id` that a line before has."""
        hashes, numbers = np.frombuffer(self.hashes, np.uint64), np.frombuffer(self.numbers, np.uint32)
        order = np.argsort(hashes, kind="stable")
        is_same = hashes[order[1:]] == hashes[order[:-1]]
        return set(numbers[order[1:][is_same]].tolist())


async def validate(stores: Stores, batch: Batch, lease: Lease, limits: Limits) -> Batch:
    """Look at every line of a batch's input, and note the errors of bad ones. Returns the batch with its total.

    Raises BadFile, LeaseLost and StoreAway. It may be done again from the beginning.
    """
    while await stores.database.write(lambda connection: line_rows.clear(connection, lease)):
        pass
    seen = _Seen()

    def look(lines: Sequence[Line]) -> list[Result]:
        return seen.take(lines, batch.asked.endpoint)

    async for bad in _windows(stores, batch, limits, look):
        if seen.total > limits.lines:
            raise BadFile("too_many_lines", f"the file has more than {limits.lines} lines")
        await _note(stores, lease, bad)
    if not seen.total:
        raise BadFile("empty_file", "the file has no lines")
    await _refuse_repeated(stores, batch, lease, limits, seen)
    return await stores.database.write(
        lambda connection: lease_rows.move(connection, lease, "in_progress", stores.clock(), total=seen.total)
    )


async def _refuse_repeated(stores: Stores, batch: Batch, lease: Lease, limits: Limits, seen: _Seen) -> None:
    """Note the errors of lines with a `custom_id` that was there before. They are read once more for its text."""
    repeated = await stores.blobs.apart(seen.repeated)
    if not repeated:
        return

    def look(lines: Sequence[Line]) -> list[Result]:
        return [_repeated(line, batch.asked.endpoint) for line in lines if line.number in repeated]

    async for bad in _windows(stores, batch, limits, look):
        await _note(stores, lease, bad)


def _repeated(line: Line, endpoint: str) -> Result:
    custom_id = request_of(line, endpoint).custom_id
    return results.unanswered(line.number, custom_id, "duplicate_custom_id", "a line before has the same `custom_id`")


async def _windows(
    stores: Stores, batch: Batch, limits: Limits, look: Callable[[Sequence[Line]], list[Result]]
) -> AsyncIterator[list[Result]]:
    """What `look` finds in each window of the input. It runs apart, so that the ingress serves meanwhile."""
    reader = await stores.blobs.reader(batch.asked.input_file_id)
    try:
        lines = LineReader(reader.file, Scan(), limits.line_bytes)

        def looked() -> list[Result] | None:
            window = lines.window(WINDOW_LINES, WINDOW_BYTES)
            return look(window) if window else None

        while (found := await stores.blobs.apart(looked)) is not None:
            yield found
    finally:
        await reader.close()


async def _note(stores: Stores, lease: Lease, bad: list[Result]) -> None:
    if bad:
        await stores.database.write(lambda connection: line_rows.add(connection, lease, bad))
