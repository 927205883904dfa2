"""Which ingress runs a batch: a lease in its row, with a deadline. Each function takes a connection in a transaction.

An ingress that takes a batch adds one to the batch's `epoch`. Each of its later changes asks that holder and epoch are
still its own. So an ingress whose batch another one has taken changes nothing any more. Clocks play no part in that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, func, select

from app.batches import batch_rows
from app.batches.records import ACTIVE, CANCELLING, Batch, Scan
from app.batches.tables import BATCHES

LEASE_S = 15.0
"""Seconds after which the batches of an ingress that is silent go to others."""


class LeaseLost(Exception):
    """Another ingress has taken the batch, or it is gone."""


@dataclass(frozen=True)
class Lease:
    """A batch that this ingress runs."""

    number: int
    holder: str
    epoch: int


def take(connection: Connection, holder: str, now_s: float, lease_s: float = LEASE_S) -> Batch | None:
    """A batch that nothing runs, or None. Owners of which fewer batches run come first, then the oldest batch."""
    running = BATCHES.alias()
    runs = select(func.count()).where(
        running.c.owner == BATCHES.c.owner, running.c.status.in_(ACTIVE), running.c.lease_until_s > now_s
    )
    is_free = _is_free(now_s)
    order = runs.scalar_subquery(), BATCHES.c.number
    number = connection.scalar(select(BATCHES.c.number).where(is_free).order_by(*order).limit(1))
    if number is None:
        return None
    taken = connection.execute(
        BATCHES.update()
        .where(BATCHES.c.number == number, is_free)
        .values(holder=holder, epoch=BATCHES.c.epoch + 1, lease_until_s=now_s + lease_s)
    )
    return batch_rows.by_number(connection, number) if taken.rowcount else None


def is_any_free(connection: Connection, now_s: float) -> bool:
    """Whether there is a batch to `take`."""
    return connection.scalar(select(BATCHES.c.number).where(_is_free(now_s)).limit(1)) is not None


def _is_free(now_s: float) -> Any:
    return and_(BATCHES.c.status.in_(ACTIVE), BATCHES.c.lease_until_s <= now_s)


def renew(
    connection: Connection, scans: Mapping[Lease, Scan], now_s: float, lease_s: float = LEASE_S
) -> dict[Lease, str]:
    """Keep leases, and note how far each batch is. Returns the status of each batch that is still held."""
    held = {}
    for lease, scan in scans.items():
        values = {"lease_until_s": now_s + lease_s, "scan_line": scan.line, "scan_offset": scan.offset}
        if connection.execute(BATCHES.update().where(is_held(lease)).values(**values)).rowcount:
            status = connection.scalar(select(BATCHES.c.status).where(BATCHES.c.number == lease.number))
            held[lease] = str(status)
    return held


def release(connection: Connection, leases: Sequence[Lease]) -> None:
    """Let others take these batches at once."""
    for lease in leases:
        connection.execute(BATCHES.update().where(is_held(lease)).values(lease_until_s=0.0, holder=""))


def change(connection: Connection, lease: Lease, **values: Any) -> None:
    """Change columns of a batch that this ingress holds. Raises LeaseLost."""
    if not connection.execute(BATCHES.update().where(is_held(lease)).values(**values)).rowcount:
        raise LeaseLost(f"batch {lease.number}")


def move(connection: Connection, lease: Lease, status: str, now_s: float, **values: Any) -> Batch:
    """Bring a batch into a status, and note when. Raises LeaseLost.

    One that its client has cancelled meanwhile stays so, unless the status is one in which it ends.
    """
    change(connection, lease, epoch=lease.epoch, **values)  # so the row is locked, and no client cancels meanwhile
    batch = batch_rows.by_number(connection, lease.number)
    if batch.status != CANCELLING or status not in ACTIVE:
        times = json.dumps({**batch.times, status: int(now_s)})
        change(connection, lease, status=status, times=times)
    return batch_rows.by_number(connection, lease.number)


def is_held(lease: Lease) -> Any:
    """The condition that a lease still counts, in time or not: what matters is that no other has taken the batch."""
    same = BATCHES.c.number == lease.number, BATCHES.c.holder == lease.holder, BATCHES.c.epoch == lease.epoch
    return and_(*same, BATCHES.c.status.in_(ACTIVE))
