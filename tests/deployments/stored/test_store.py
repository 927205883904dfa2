"""The store of responses: bounds in bytes and time, owners, leases."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.stored.calls import Begin, Cancel, Delete, Events, Get, News, Put, Report, Stored, Verdict
from deployments.stored.store import ENTRY_BYTES, LOST, NO_ROOM, ResponseStore

ROOM = 10 * (ENTRY_BYTES + 100)
TTL_S, LEASE_S = 60.0, 10.0


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Books:
    """A store and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = ResponseStore(ROOM, TTL_S, LEASE_S, self.clock)

    async def put(self, response_id: str, owner: str = "a", size: int = 100) -> bool:
        return await self.store.ask(Put(response_id, Stored(owner, "completed", b"x" * size, b"")))

    async def begin(self, response_id: str, owner: str = "a", streamed: bool = False) -> bool:
        stored = Stored(owner, "queued", b"x" * 90, b"[]", background=True)
        return await self.store.ask(Begin(response_id, stored, streamed))

    async def report(self, response_id: str, *events: bytes, first: int = 0) -> Verdict:
        return (await self.store.ask(Report({response_id: News("in_progress", first, events)})))[response_id]

    async def finish(self, response_id: str, owner: str = "a", size: int = 100, last: News | None = None) -> bool:
        stored = Stored(owner, "completed", b"y" * size, b"[]", background=True)
        return await self.store.ask(Put(response_id, stored, last))

    async def get(self, response_id: str, owner: str = "a") -> Stored | None:
        return await self.store.ask(Get(response_id, owner))


@pytest.fixture
def books() -> Books:
    return Books()


async def test_only_its_owner_finds_a_response(books: Books) -> None:
    assert await books.put("1")
    assert await books.get("1") == Stored("a", "completed", b"x" * 100, b"")
    assert await books.get("1", "b") is None
    assert await books.get("1", "") is None
    assert await books.store.ask(Cancel("1", "b")) is None
    assert await books.store.ask(Events("1", "b", 0)) is None
    assert not await books.store.ask(Delete("1", "b"))
    assert await books.get("1")
    assert await books.store.ask(Delete("1", "a"))
    assert await books.get("1") is None
    assert books.store.held == (0, 0)


async def test_what_is_over_has_its_time(books: Books) -> None:
    await books.put("1")
    books.clock.now_s = TTL_S / 2
    await books.put("2")
    books.clock.now_s = TTL_S
    assert await books.get("1") is None
    assert await books.get("2")
    books.clock.now_s = 2 * TTL_S
    books.store.sweep()
    assert books.store.held == (0, 0)


async def test_the_oldest_of_the_largest_owner_goes_first(books: Books) -> None:
    await books.put("small", "b")
    for n in range(30):
        assert await books.put(str(n))
    assert await books.get("small", "b"), "one client does not push out what another has stored"
    assert [n for n in range(30) if await books.get(str(n))] == list(range(21, 30))
    assert books.store.held == (10, ROOM)


async def test_a_response_over_the_bound_is_refused_and_nothing_leaves_for_it(books: Books) -> None:
    await books.put("1")
    assert not await books.put("2", size=ROOM)
    assert await books.get("1")
    assert books.store.held[0] == 1


async def test_what_runs_stays_and_is_refused_where_it_would_not_fit(books: Books) -> None:
    for n in range(10):
        assert await books.begin(f"runs {n}")
    assert not await books.begin("one more")
    assert not await books.put("over")
    assert books.store.held[0] == 10


async def test_a_background_response_from_its_beginning_to_its_end(books: Books) -> None:
    await books.begin("1", streamed=True)
    found = await books.get("1")
    assert found is not None
    assert found.status == "queued"
    assert await books.report("1", b"e0", b"e1") is Verdict.RUNS
    assert await books.report("1", b"e1", b"e2", first=1) is Verdict.RUNS, "a repeated report"
    so_far = await books.store.ask(Events("1", "a", 1))
    assert so_far is not None
    assert (so_far.events, so_far.stored.status) == ((b"e1", b"e2"), "in_progress")
    assert await books.finish("1", last=News("completed", 3, (b"e3",)))
    assert await books.report("1") is Verdict.OVER
    ended = await books.store.ask(Events("1", "a", 3))
    assert ended is not None
    assert (ended.events, ended.stored.status) == ((b"e3",), "completed")
    assert not await books.finish("1"), "it is over"
    books.clock.now_s = TTL_S
    books.store.sweep()
    assert books.store.held == (0, 0)


async def test_events_are_kept_only_where_they_are_asked_for(books: Books) -> None:
    await books.begin("1")
    await books.report("1", b"e0")
    found = await books.store.ask(Events("1", "a", 0))
    assert found is not None
    assert found.events is None


async def test_events_for_which_there_is_no_room_are_dropped_and_the_response_goes_on(books: Books) -> None:
    await books.begin("1", streamed=True)
    assert await books.report("1", b"e" * ROOM) is Verdict.RUNS
    found = await books.store.ask(Events("1", "a", 0))
    assert found is not None
    assert found.events is None
    assert await books.finish("1", last=News("completed", 1, (b"e1",)))
    assert books.store.held[0] == 1


async def test_without_reports_a_response_has_failed_and_stays_so(books: Books) -> None:
    await books.begin("1")
    books.clock.now_s = LEASE_S - 1
    assert await books.report("1") is Verdict.RUNS
    books.clock.now_s = 2 * LEASE_S - 2
    found = await books.get("1")
    assert found is not None
    assert found.status == "in_progress"
    books.clock.now_s = 2 * LEASE_S
    found = await books.get("1")
    assert found is not None
    assert (found.status, found.reason) == ("failed", LOST)
    assert await books.report("1") is Verdict.OVER, "its ingress comes back"
    assert not await books.finish("1")
    assert await books.get("1") == found


async def test_cancelling_is_final_and_may_be_repeated(books: Books) -> None:
    await books.begin("1")
    for _ in range(2):
        found = await books.store.ask(Cancel("1", "a"))
        assert found is not None
        assert found.status == "cancelled"
    assert await books.report("1") is Verdict.OVER
    assert not await books.finish("1")
    await books.begin("2")
    await books.finish("2")
    found = await books.store.ask(Cancel("2", "a"))
    assert found is not None
    assert found.status == "completed", "it is over"


async def test_a_deleted_response_ends_where_it_runs_and_comes_not_back(books: Books) -> None:
    await books.begin("1")
    await books.begin("2")
    for name in "12":
        assert await books.store.ask(Delete(name, "a"))
        assert await books.get(name) is None
    assert not await books.finish("1")
    assert await books.report("2") is Verdict.OVER
    await books.begin("3")
    await books.store.ask(Delete("3", "a"))
    books.clock.now_s = LEASE_S  # its ingress is gone
    assert await books.get("3") is None
    assert books.store.held == (0, 0)


async def test_a_store_that_has_forgotten_is_told_again(books: Books) -> None:
    assert await books.report("1") is Verdict.UNKNOWN
    assert await books.finish("1", last=News("completed", 0, (b"e0", b"e1")))
    found = await books.store.ask(Events("1", "a", 0))
    assert found is not None
    assert found.events == (b"e0", b"e1")


async def test_an_answer_without_room_makes_the_response_fail(books: Books) -> None:
    await books.begin("1")
    assert not await books.finish("1", size=2 * ROOM)
    found = await books.get("1")
    assert found is not None
    assert (found.status, found.reason) == ("failed", NO_ROOM)


NAMES = st.sampled_from(["1", "2", "3", "4"])
DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["put", "begin", "report", "finish", "cancel", "delete", "wait"]),
        NAMES,
        st.sampled_from(["a", "b"]),
        st.integers(0, ROOM // 2),
    )
)


@given(DEEDS)
def test_bytes_are_counted_exactly_in_any_order_of_calls(deeds: list[tuple[str, str, str, int]]) -> None:
    asyncio.run(_all_done(deeds))


async def _all_done(deeds: list[tuple[str, str, str, int]]) -> None:
    books = Books()
    for deed, name, owner, size in deeds:
        match deed:
            case "put":
                await books.put(name, owner, size)
            case "begin":
                await books.begin(name, owner, streamed=size % 2 == 0)
            case "report":
                await books.report(name, b"e" * size)
            case "finish":
                await books.finish(name, owner, size)
            case "cancel":
                await books.store.ask(Cancel(name, owner))
            case "delete":
                await books.store.ask(Delete(name, owner))
            case "wait":
                books.clock.now_s += size % 20
        assert 0 <= books.store.held[1] <= ROOM
    books.clock.now_s += LEASE_S
    books.store.sweep()
    books.clock.now_s += TTL_S
    books.store.sweep()
    assert books.store.held == (0, 0)
