"""The table of batches, as clients see it. Each function takes a connection in a transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, func, select

from app.batches import file_rows
from app.batches.file_rows import Page, Quota
from app.batches.records import (
    ACTIVE,
    CANCELLING,
    IN_PROGRESS,
    UPLOAD,
    VALIDATING,
    Asked,
    Batch,
    Counts,
    Made,
    Scan,
    Usage,
    astuple,
)
from app.batches.tables import BATCHES
from app.errors import BadBatchRequest, BatchNotFound, BatchOver, BatchQuotaSpent

_ZEROS = ("total", "completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


def create(connection: Connection, batch_id: str, owner: str, asked: Asked, quota: Quota, now_s: float) -> Batch:
    """A new batch. Raises BatchFileNotFound, BadBatchRequest and BatchQuotaSpent."""
    file = file_rows.get(connection, asked.input_file_id, owner, now_s)
    if file.purpose != UPLOAD:
        raise BadBatchRequest(f"the file {file.id} has the purpose {file.purpose}, and not {UPLOAD}", "input_file_id")
    active = connection.scalar(select(func.count()).where(BATCHES.c.owner == owner, BATCHES.c.status.in_(ACTIVE)))
    if (active or 0) >= quota.batches:
        raise BatchQuotaSpent(f"this API key has {active} batches that are not over, and may have {quota.batches}")
    values: dict[str, Any] = dict.fromkeys(_ZEROS, 0)
    values |= {"id": batch_id, "owner": owner, "status": VALIDATING, "input_file_id": file.id, "outcome": ""}
    values |= {"asked": json.dumps(asdict(asked)), "times": "{}", "created_s": int(now_s)}
    values |= {"expires_s": int(now_s) + asked.window_s, "scan_line": 1, "scan_offset": 0}
    values |= {"holder": "", "epoch": 0, "lease_until_s": 0.0, "is_swept": False}
    connection.execute(BATCHES.insert().values(**values))
    return get(connection, batch_id, owner)


def get(connection: Connection, batch_id: str, owner: str) -> Batch:
    """Raises BatchNotFound where this owner has none."""
    row = connection.execute(select(BATCHES).where(BATCHES.c.id == batch_id, BATCHES.c.owner == owner)).first()
    if row is None:
        raise BatchNotFound(f"there is no batch {batch_id[:100]!r} of this API key")
    return batch_of(row)


def listed(connection: Connection, owner: str, page: Page) -> tuple[list[Batch], bool]:
    """A page of an owner's batches, the newest first, and whether there are more. Raises BatchNotFound."""
    query = select(BATCHES).where(BATCHES.c.owner == owner)
    if page.after:
        query = query.where(BATCHES.c.number < get(connection, page.after, owner).number)
    rows = connection.execute(query.order_by(BATCHES.c.number.desc()).limit(page.limit + 1)).all()
    return [batch_of(row) for row in rows[: page.limit]], len(rows) > page.limit


def cancel(connection: Connection, batch_id: str, owner: str, now_s: float) -> Batch:
    """Let a batch end where it is. One that is being finished goes on. Raises BatchNotFound and BatchOver."""
    batch = get(connection, batch_id, owner)
    if batch.status not in ACTIVE:
        raise BatchOver(f"the batch {batch_id} is {batch.status}, and cannot be cancelled")
    if batch.status in (VALIDATING, IN_PROGRESS):
        times = json.dumps({**batch.times, CANCELLING: int(now_s)})
        connection.execute(
            BATCHES.update()
            .where(BATCHES.c.number == batch.number, BATCHES.c.status == batch.status)
            .values(status=CANCELLING, times=times)
        )
    return get(connection, batch_id, owner)


def by_number(connection: Connection, number: int) -> Batch:
    """The batch with this number, which exists."""
    return batch_of(connection.execute(select(BATCHES).where(BATCHES.c.number == number)).one())


def batch_of(row: Row[Any]) -> Batch:
    """The batch of a whole row."""
    kept = row._mapping
    return Batch(
        **{name: kept[name] for name in ("number", "id", "owner", "status", "created_s", "expires_s")},
        asked=Asked(**json.loads(kept["asked"])),
        outcome=kept["outcome"],
        times=json.loads(kept["times"]),
        counts=Counts(kept["total"], kept["completed"], kept["failed"]),
        usage=Usage(kept["input_tokens"], kept["cached_tokens"], kept["output_tokens"], kept["reasoning_tokens"]),
        errors=json.loads(kept["errors"] or "[]"),
        made=Made(kept["output_file_id"], kept["error_file_id"]),
        scan=Scan(kept["scan_line"], kept["scan_offset"]),
        epoch=kept["epoch"],
    )


def added(usage: Usage) -> Mapping[str, Any]:
    """The columns of `usage`, each with so much more."""
    names = _ZEROS[3:]
    return {name: BATCHES.c[name] + more for name, more in zip(names, astuple(usage), strict=True)}


def errors_text(errors: Sequence[Mapping[str, Any]]) -> str | None:
    """The column `errors`."""
    return json.dumps(list(errors)) if errors else None
