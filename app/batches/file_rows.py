"""The table of files. Each function takes a connection in a transaction (`app.batches.database`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, func, or_, select

from app.batches.records import ACTIVE, File
from app.batches.tables import BATCHES, FILES
from app.errors import BatchFileInUse, BatchFileNotFound, BatchQuotaSpent

PENDING, READY, DELETING = "pending", "ready", "deleting"
LEFT_S = 900.0
"""A pending file that has not grown for so long was left by an ingress that is gone."""
_SHOWN = (FILES.c.id, FILES.c.owner, FILES.c.purpose, FILES.c.filename, FILES.c.bytes, FILES.c.created_s)


@dataclass(frozen=True)
class Quota:
    """What one owner may have at once, and `total_bytes`: all of them together."""

    files: int
    bytes: int
    total_bytes: int
    batches: int


@dataclass(frozen=True)
class Page:
    """Which part of a list is asked for. `after`: the id before the first one; "": from the beginning."""

    limit: int
    after: str = ""
    descending: bool = True


def begin(connection: Connection, file: File, quota: Quota | None, now_s: float) -> None:
    """A file's bytes are about to be written. Raises BatchQuotaSpent. `quota`: None: there is no limit."""
    if quota is not None:
        count = connection.scalar(select(func.count()).where(FILES.c.owner == file.owner))
        if (count or 0) >= quota.files:
            raise BatchQuotaSpent(f"this API key has {count} files, and may have {quota.files}: delete some")
    values = {"state": PENDING, "touched_s": now_s, "expires_s": file.expires_s, **_values(file)}
    connection.execute(FILES.insert().values(**values))


def _values(file: File) -> dict[str, Any]:
    names = ("id", "owner", "purpose", "filename", "bytes", "created_s")
    return {name: getattr(file, name) for name in names}


def grew(connection: Connection, file_id: str, bytes_: int, now_s: float) -> None:
    """So much of a pending file is written. Raises BatchFileNotFound where it was taken for left."""
    changed = connection.execute(
        FILES.update().where(FILES.c.id == file_id, FILES.c.state == PENDING).values(bytes=bytes_, touched_s=now_s)
    )
    if not changed.rowcount:
        raise BatchFileNotFound(f"the file {file_id} was left unfinished for too long")


def finish(connection: Connection, file_id: str, bytes_: int, quota: Quota | None, now_s: float) -> None:
    """A file's bytes are written: it is shown from now on. Raises BatchQuotaSpent and BatchFileNotFound."""
    grew(connection, file_id, bytes_, now_s)
    if quota is not None:
        owner = connection.scalar(select(FILES.c.owner).where(FILES.c.id == file_id))
        used, total = (_bytes(connection, of) for of in (owner, None))
        if used > quota.bytes or total > quota.total_bytes:
            which = "all files together" if used <= quota.bytes else "the files of this API key"
            raise BatchQuotaSpent(f"with this one {which} have more bytes than they may: delete some")
    connection.execute(FILES.update().where(FILES.c.id == file_id).values(state=READY))


def finish_upload(connection: Connection, file: File, quota: Quota, now_s: float) -> None:
    """As `finish`, with what the form has said of the file."""
    values = {"filename": file.filename, "expires_s": file.expires_s}
    connection.execute(FILES.update().where(FILES.c.id == file.id).values(**values))
    finish(connection, file.id, file.bytes, quota, now_s)


def _bytes(connection: Connection, owner: str | None) -> int:
    query = select(func.coalesce(func.sum(FILES.c.bytes), 0))
    return int(connection.scalar(query if owner is None else query.where(FILES.c.owner == owner)) or 0)


def get(connection: Connection, file_id: str, owner: str, now_s: float) -> File:
    """Raises BatchFileNotFound where this owner has none."""
    row = connection.execute(_query().where(FILES.c.id == file_id, FILES.c.owner == owner, _is_shown(now_s))).first()
    if row is None:
        raise BatchFileNotFound(f"there is no file {file_id[:100]!r} of this API key")
    return _file(row)


def listed(connection: Connection, owner: str, page: Page, purpose: str, now_s: float) -> tuple[list[File], bool]:
    """A page of an owner's files, and whether there are more. `purpose`: "": any. Raises BatchFileNotFound."""
    query = _query().where(FILES.c.owner == owner, _is_shown(now_s))
    if purpose:
        query = query.where(FILES.c.purpose == purpose)
    if page.after:
        number = connection.scalar(select(FILES.c.number).where(FILES.c.id == page.after, FILES.c.owner == owner))
        if number is None:
            raise BatchFileNotFound(f"there is no file {page.after[:100]!r} of this API key")
        query = query.where(FILES.c.number < number if page.descending else FILES.c.number > number)
    order = FILES.c.number.desc() if page.descending else FILES.c.number
    rows = connection.execute(query.order_by(order).limit(page.limit + 1)).all()
    return [_file(row) for row in rows[: page.limit]], len(rows) > page.limit


def delete(connection: Connection, file_id: str, owner: str, now_s: float) -> None:
    """Show a file no more; `forget` it when its bytes are gone. Raises BatchFileNotFound and BatchFileInUse."""
    get(connection, file_id, owner, now_s)
    using = connection.scalar(_uses().where(BATCHES.c.input_file_id == file_id))
    if using is not None:
        raise BatchFileInUse(f"the batch {using} reads the file {file_id}")
    connection.execute(FILES.update().where(FILES.c.id == file_id).values(state=DELETING))


def drop(connection: Connection, file_id: str) -> None:
    """A pending file is not to be finished."""
    connection.execute(FILES.update().where(FILES.c.id == file_id, FILES.c.state == PENDING).values(state=DELETING))


def forget(connection: Connection, file_id: str) -> None:
    """The bytes of a deleted file are gone."""
    connection.execute(FILES.delete().where(FILES.c.id == file_id, FILES.c.state == DELETING))


def due(connection: Connection, now_s: float, limit: int) -> list[str]:
    """Files whose bytes are to go: deleted ones, and from now on those that have expired or were left unfinished."""
    is_read = _uses().where(BATCHES.c.input_file_id == FILES.c.id).exists()
    is_late = FILES.c.expires_s <= now_s, ~is_read, FILES.c.state == READY
    is_left = FILES.c.touched_s < now_s - LEFT_S, FILES.c.state == PENDING
    for conditions in (is_late, is_left):
        connection.execute(FILES.update().where(*conditions).values(state=DELETING))
    found = connection.scalars(select(FILES.c.id).where(FILES.c.state == DELETING).limit(limit))
    return list(found)


def _uses() -> Select[Any]:
    return select(BATCHES.c.id).where(BATCHES.c.status.in_(ACTIVE)).limit(1)


def _query() -> Select[Any]:
    return select(*_SHOWN, FILES.c.expires_s)


def _is_shown(now_s: float) -> Any:
    is_read = _uses().where(BATCHES.c.input_file_id == FILES.c.id).exists()
    return (FILES.c.state == READY) & or_(FILES.c.expires_s.is_(None), FILES.c.expires_s > now_s, is_read)


def _file(row: Row[Any]) -> File:
    return File(**row._mapping)
