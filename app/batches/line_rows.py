"""The journal: a row for each answered line. Each function takes a connection in a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, select

from app.batches import batch_rows
from app.batches.lease_rows import Lease, change
from app.batches.records import ACTIVE, Usage
from app.batches.tables import BATCHES, LINES

PIECE = 1000
"""Rows of one transaction where there are many."""


@dataclass(frozen=True)
class Result:
    """An answered line. `text`: the line that it becomes in the output file, or in the error file where not `is_ok`."""

    line: int
    is_ok: bool
    text: bytes
    usage: Usage = field(default_factory=Usage)


def add(connection: Connection, lease: Lease, results: Sequence[Result]) -> None:
    """Note answered lines, all or none. Raises LeaseLost. No line is noted twice, also not by a call that is made again
    because the answer to the first one was lost."""
    lines = [result.line for result in results]
    known = set(connection.scalars(select(LINES.c.line).where(LINES.c.batch == lease.number, LINES.c.line.in_(lines))))
    results = [result for result in results if result.line not in known]
    usage = sum((result.usage for result in results), Usage())
    ok = sum(result.is_ok for result in results)
    counts = {"completed": BATCHES.c.completed + ok, "failed": BATCHES.c.failed + len(results) - ok}
    change(connection, lease, **counts, **batch_rows.added(usage))
    rows = [
        {"batch": lease.number, "line": result.line, "is_ok": result.is_ok, "result": result.text} for result in results
    ]
    if rows:
        connection.execute(LINES.insert(), rows)


def clear(connection: Connection, lease: Lease) -> bool:
    """Begin a batch's validation anew: drop a piece of what an ingress before has noted. False when all is gone."""
    change(connection, lease, total=0, completed=0, failed=0)
    return _drop(connection, lease.number)


def answered(connection: Connection, number: int, first: int, last: int) -> set[int]:
    """The lines from `first` to `last` that are answered."""
    query = select(LINES.c.line).where(LINES.c.batch == number, LINES.c.line.between(first, last))
    return set(connection.scalars(query))


def between(connection: Connection, number: int, first: int, last: int) -> dict[int, tuple[bool, bytes]]:
    """What the lines from `first` to `last` have become, those that are answered."""
    query = select(LINES.c.line, LINES.c.is_ok, LINES.c.result)
    rows = connection.execute(query.where(LINES.c.batch == number, LINES.c.line.between(first, last)))
    return {line: (is_ok, bytes(result)) for line, is_ok, result in rows}


def after(connection: Connection, number: int, line: int, limit: int) -> list[tuple[int, bool, bytes]]:
    """The next answered lines after one, in order, each with what it has become."""
    query = select(LINES.c.line, LINES.c.is_ok, LINES.c.result).where(LINES.c.batch == number, LINES.c.line > line)
    rows = connection.execute(query.order_by(LINES.c.line).limit(limit))
    return [(at, is_ok, bytes(result)) for at, is_ok, result in rows]


def sweep(connection: Connection) -> bool:
    """Drop a piece of the journal of a batch that is over. False when there is none to drop."""
    is_due = BATCHES.c.status.not_in(ACTIVE), BATCHES.c.is_swept.is_(False)
    number = connection.scalar(select(BATCHES.c.number).where(*is_due).limit(1))
    if number is None:
        return False
    if not _drop(connection, number):
        connection.execute(BATCHES.update().where(BATCHES.c.number == number).values(is_swept=True))
    return True


def _drop(connection: Connection, number: int) -> bool:
    first: Any = select(LINES.c.line).where(LINES.c.batch == number).order_by(LINES.c.line).limit(PIECE)
    found = connection.execute(delete(LINES).where(LINES.c.batch == number, LINES.c.line.in_(first)))
    return bool(found.rowcount)
