"""Leases and the journal, as several ingresses use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
from sqlalchemy import Connection

from app.batches import batch_rows, file_rows, lease_rows, line_rows
from app.batches.file_rows import LEFT_S, Page
from app.batches.lease_rows import LEASE_S, Lease, LeaseLost
from app.batches.line_rows import PIECE, Result
from app.batches.records import Asked, Batch, Counts, Scan, Usage
from app.batches.stores import NewFile, Stores
from tests.app.batches.toys import CHAT, DAY_S, QUOTA, Clock

A = TypeVar("A")


class Store:
    """The stores, and a clock."""

    def __init__(self, stores: Stores, clock: Clock) -> None:
        self.stores, self.clock, self.made = stores, clock, 0

    async def do(self, work: Callable[[Connection], A]) -> A:
        return await self.stores.database.write(work)

    async def file(self, owner: str = "a", purpose: str = "batch", size: int = 10) -> str:
        new = await NewFile.begin(self.stores, self.stores.new_file(owner, purpose, "x"), QUOTA)
        await new.write(b"x" * size)
        await new.close()
        await self.do(lambda c: file_rows.finish(c, new.file.id, size, QUOTA, self.clock.now_s))
        return new.file.id

    async def batch(self, owner: str = "a") -> Batch:
        file_id = await self.file(owner)
        self.made += 1
        asked, name = Asked(CHAT, file_id, "24h", DAY_S), f"batch_{self.made}"
        return await self.do(lambda c: batch_rows.create(c, name, owner, asked, QUOTA, self.clock.now_s))

    async def take(self, holder: str) -> Lease | None:
        batch = await self.do(lambda c: lease_rows.take(c, holder, self.clock.now_s))
        return None if batch is None else Lease(batch.number, holder, batch.epoch)

    async def held(self, holder: str) -> Lease:
        lease = await self.take(holder)
        assert lease is not None
        return lease

    async def now(self, lease: Lease) -> Batch:
        return await self.do(lambda c: batch_rows.by_number(c, lease.number))


@pytest.fixture
def store(stores: Stores, clock: Clock) -> Store:
    return Store(stores, clock)


async def test_one_ingress_has_a_batch_until_it_is_silent_for_as_long_as_a_lease(store: Store) -> None:
    await store.batch()
    lease = await store.held("one")
    assert await store.take("two") is None
    store.clock.now_s += LEASE_S - 1
    assert await store.do(lambda c: lease_rows.renew(c, {lease: Scan(5, 50)}, store.clock.now_s)) == {
        lease: "validating"
    }
    store.clock.now_s += LEASE_S - 1
    assert await store.take("two") is None
    store.clock.now_s += 1
    later = await store.held("two")
    assert (later.number, later.epoch) == (lease.number, lease.epoch + 1)
    assert (await store.now(later)).scan == Scan(5, 50)


async def test_an_ingress_that_lost_a_batch_changes_nothing_of_it(store: Store) -> None:
    await store.batch()
    lost = await store.held("one")
    store.clock.now_s += LEASE_S
    lease = await store.held("one")  # the same ingress, after it was taken for dead
    before = await store.now(lease)
    for change in (
        lambda c: line_rows.add(c, lost, [Result(1, True, b"x")]),
        lambda c: lease_rows.move(c, lost, "completed", 0.0),
        lambda c: line_rows.clear(c, lost),
    ):
        with pytest.raises(LeaseLost):
            await store.do(change)
    assert await store.do(lambda c: lease_rows.renew(c, {lost: Scan(9, 9)}, store.clock.now_s)) == {}
    await store.do(lambda c: lease_rows.release(c, [lost]))
    assert await store.now(lease) == before
    assert await store.do(lambda c: line_rows.after(c, lease.number, 0, 9)) == []


async def test_a_released_batch_is_free_at_once(store: Store) -> None:
    await store.batch()
    lease = await store.held("one")
    await store.do(lambda c: lease_rows.release(c, [lease]))
    assert (await store.held("two")).number == lease.number


async def test_the_owner_with_fewer_running_batches_comes_first(store: Store) -> None:
    batches = [await store.batch(owner) for owner in ("a", "a", "a", "b")]
    taken = [(await store.held("one")).number for _ in range(4)]
    assert taken == [batches[at].number for at in (0, 3, 1, 2)]
    assert await store.take("one") is None


async def test_a_line_is_noted_once_and_counted_once(store: Store) -> None:
    await store.batch()
    lease = await store.held("one")
    first = [Result(2, True, b"two", Usage(1, 2, 3, 4)), Result(1, False, b"one")]
    await store.do(lambda c: line_rows.add(c, lease, first))
    await store.do(lambda c: line_rows.add(c, lease, [*first, Result(3, True, b"three", Usage(10, 20, 30, 40))]))
    batch = await store.now(lease)
    assert (batch.counts, batch.usage) == (Counts(0, 2, 1), Usage(11, 22, 33, 44))
    found = [(1, False, b"one"), (2, True, b"two"), (3, True, b"three")]
    assert await store.do(lambda c: line_rows.after(c, lease.number, 0, 9)) == found
    assert await store.do(lambda c: line_rows.answered(c, lease.number, 2, 9)) == {2, 3}
    assert await store.do(lambda c: line_rows.between(c, lease.number, 1, 1)) == {1: (False, b"one")}


async def test_a_cancelled_batch_stays_so_until_it_ends(store: Store) -> None:
    made = await store.batch()
    lease = await store.held("one")
    await store.do(lambda c: batch_rows.cancel(c, made.id, "a", 7.0))
    moved = await store.do(lambda c: lease_rows.move(c, lease, "in_progress", 8.0, total=5))
    assert (moved.status, moved.counts.total, moved.times) == ("cancelling", 5, {"cancelling": 7})
    ended = await store.do(lambda c: lease_rows.move(c, lease, "cancelled", 9.0))
    assert (ended.status, ended.times) == ("cancelled", {"cancelling": 7, "cancelled": 9})


async def test_the_journal_of_a_batch_that_is_over_goes_piece_by_piece(store: Store) -> None:
    await store.batch()
    lease = await store.held("one")
    results = [Result(number, True, b"x") for number in range(1, 2 * PIECE + 2)]
    await store.do(lambda c: line_rows.add(c, lease, results))
    assert not await store.do(line_rows.sweep)
    await store.do(lambda c: lease_rows.move(c, lease, "completed", 9.0))
    steps = 0
    while await store.do(line_rows.sweep):
        steps += 1
    assert steps == 4  # three pieces, and the look that finds nothing more
    assert await store.do(lambda c: line_rows.after(c, lease.number, 0, 9)) == []


async def test_a_file_that_was_left_unfinished_goes_and_one_that_grows_stays(store: Store, clock: Clock) -> None:
    left, grows = [await NewFile.begin(store.stores, store.stores.new_file("a", "batch", "x"), None) for _ in "ab"]
    clock.now_s += LEFT_S / 2
    await grows.write(b"x")
    clock.now_s += LEFT_S / 2 + 1
    assert await store.do(lambda c: file_rows.due(c, clock.now_s, 9)) == [left.file.id]
    for new in (left, grows):
        await new.drop()
    assert await store.do(lambda c: file_rows.due(c, clock.now_s, 9)) == []
    assert (await store.do(lambda c: file_rows.listed(c, "a", Page(9), "", clock.now_s)))[0] == []
