"""The parts that move to another replica, and the log of those that have ended."""

from __future__ import annotations

import asyncio

import pytest

from deployments.engine.protocol import EngineError
from deployments.messages import MOVED, Finished, SessionTask
from deployments.replica.parts import FINISHED_KEPT, Part, Parts
from tests.deployments.replica.doubles import WAIT_S, Fixture, Ingress, until


async def test_sessions_are_let_go_once_they_have_begun(up: Fixture) -> None:
    runs = {name: await up.begin(name, movable=name != "c") for name in "abcd"}
    up.engine.put(("a", 2, False), ("b", 1, False), ("c", 1, False))
    await until(lambda: up.replica._parts.open["a"].started)
    assert up.replica.move_out(["s-a", "s-c", "s-d", "s-unknown"]) == 2
    outcome = await asyncio.wait_for(runs["a"], WAIT_S)
    assert outcome == MOVED
    assert up.engine.aborted == ["a"], "it has given its blocks back when it says so"
    up.engine.put(("d", 1, False), ("c", 1, False))
    assert await asyncio.wait_for(runs["d"], WAIT_S) == MOVED
    told = await up.manager.until(lambda snapshot: snapshot.counters.get("moved_out") == 2)
    assert told.sessions == ("s-b", "s-c")
    assert told.finished[-1] == Finished("s-d", 1, 1)
    assert up.replica.move_out() == 1
    assert await asyncio.wait_for(runs["b"], WAIT_S) == MOVED
    up.engine.put(("c", 1, True))
    assert await asyncio.wait_for(runs["c"], WAIT_S) == "finished"
    assert up.replica.move_out() == 0


async def test_a_part_that_needs_what_others_hold_has_them_let_go_before_it_begins(up: Fixture) -> None:
    runs = {name: await up.begin(name, movable=name != "c") for name in "abcd"}
    up.engine.put(("a", 1, False), ("c", 1, False), ("d", 1, False))
    await until(lambda: up.replica._parts.open["d"].started)
    taker = await up.begin("e", let_go=("s-a", "s-b", "s-c", "s-unknown"))
    assert await asyncio.wait_for(runs["a"], WAIT_S) == MOVED
    calls = up.engine.calls
    assert calls.index(("abort", "a")) < calls.index(("add", "e"))
    assert set(up.engine.aborted) == {"a"}, "one has not begun, and one cannot go on elsewhere"
    up.engine.put(("b", 1, False), ("c", 1, False), ("e", 1, True))
    assert await asyncio.wait_for(runs["b"], WAIT_S) == MOVED
    assert await asyncio.wait_for(taker, WAIT_S) == "finished"
    up.engine.put(("c", 1, True), ("d", 1, True))
    assert [await asyncio.wait_for(runs[name], WAIT_S) for name in "cd"] == ["finished"] * 2
    told = await up.manager.until(lambda snapshot: not snapshot.sessions)
    assert told.counters["moved_out"] == 2


async def test_it_tells_which_parts_ended_however_they_did(up: Fixture) -> None:
    run, lost = await up.begin("a"), await up.begin("b")
    await up.manager.until(lambda snapshot: len(snapshot.sessions) == 2)
    up.engine.put(("a", 1, False))
    up.engine.put(("a", 2, True), ("b", 1, False))
    await asyncio.wait_for(run, WAIT_S)
    await until(lambda: up.replica._parts.open["b"].output_tokens == 1)
    lost.cancel()
    await asyncio.wait([lost])
    up.engine.refusal = EngineError("not a request")
    with pytest.raises(EngineError):
        await up.run("c")
    told = await up.manager.until(lambda snapshot: snapshot.finished_version == 3)
    assert told.finished == (Finished("s-a", 1, 3), Finished("s-b", 1, 1), Finished("s-c", 1, 0))
    begun = [s for s in up.manager.snapshots if s.sessions or s.finished]
    assert len(begun) < len(up.manager.snapshots)
    for snapshot in begun:
        ended = {part.session_id for part in snapshot.finished}
        assert not ended & set(snapshot.sessions), "a part that ended runs no more"
    both = begun[next(n for n, snapshot in enumerate(begun) if len(snapshot.sessions) == 2) :]
    assert all({"s-a", "s-b"} <= {*s.sessions, *(part.session_id for part in s.finished)} for s in both)


async def test_the_log_of_ended_parts_is_bounded_and_its_version_counts_on(up: Fixture) -> None:
    up.engine.refusal = EngineError("not a request")
    count = FINISHED_KEPT + 6
    for number in range(count):
        with pytest.raises(EngineError):
            await up.run(f"r{number}")
    told = await up.manager.until(lambda snapshot: snapshot.finished_version == count)
    assert [part.session_id for part in told.finished] == [f"s-r{number}" for number in range(6, count)]


# ---- the parts alone


INGRESS = Ingress()


def begun(parts: Parts, request_id: str = "a", started: bool = True, ingress: Ingress = INGRESS) -> Part:
    """A movable part; `started`: it has had an output."""
    part = parts.begin(SessionTask(f"s-{request_id}", 1, "r0", request_id, (), 60.0, 30, movable=True), ingress, 1)
    part.started = started
    return part


async def test_a_part_that_is_over_keeps_its_outcome() -> None:
    parts = Parts()
    finished, failed = begun(parts, "a"), begun(parts, "b")
    finished.done.set_result("finished")
    failed.fail(EngineError("out of memory"))
    assert parts.move_out() == 0
    parts.fail(EngineError("the replica is stopping"))
    parts.orphan(INGRESS)
    assert finished.done.result() == "finished"
    with pytest.raises(EngineError, match="out of memory"):
        failed.done.result()
    assert parts.moved_out == 0
    parts.end(finished)
    assert parts.tell() == (Finished("s-a", 1, 0, orphaned=True),), "its ingress will not close the session"


async def test_a_part_moves_once() -> None:
    parts = Parts()
    part = begun(parts)
    assert [parts.move_out() for _ in range(2)] == [1, 0]
    parts.move_if_started(part)
    assert (part.done.result(), parts.moved_out) == (MOVED, 1)


async def test_a_part_without_an_output_moves_with_its_first_one_and_one_that_is_not_asked_for_stays() -> None:
    parts = Parts()
    waits, stays = begun(parts, "a", started=False), begun(parts, "b")
    assert [parts.move_out(["s-a"]) for _ in range(2)] == [1, 1]
    parts.move_if_started(waits)
    assert (waits.done.done(), parts.moved_out) == (False, 0)
    waits.started = True
    for part in (waits, stays):
        parts.move_if_started(part)
    assert (waits.done.result(), stays.done.done(), parts.moved_out) == (MOVED, False, 1)


async def test_parts_are_orphaned_by_their_own_ingress_alone() -> None:
    parts = Parts()
    mine, other = begun(parts, "a"), begun(parts, "b", ingress=Ingress())
    parts.orphan(Ingress())
    assert not mine.done.done()
    parts.orphan(INGRESS)
    with pytest.raises(EngineError, match="the ingress is gone"):
        mine.done.result()
    assert (mine.orphaned, other.orphaned, other.done.done()) == (True, False, False)


async def test_the_log_is_filling_when_half_of_it_is_news() -> None:
    parts = Parts()
    for _ in range(2):
        for _ in range(FINISHED_KEPT // 2):
            assert not parts.is_log_filling
            parts.end(begun(parts))
        assert parts.is_log_filling
        parts.tell()
    assert not parts.open
    assert parts.ended_version == len(parts.tell()) == FINISHED_KEPT, "what was told stays in the log"
