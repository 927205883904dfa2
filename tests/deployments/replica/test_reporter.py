"""What a replica reports, when it does, and how it acts on the answer."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

import pytest

from deployments.errors import Unavailable
from deployments.manager.calls import Report
from deployments.messages import MOVED, CacheChange, Phase, ReplicaSnapshot, ReportAnswer, Role
from deployments.replica.parts import FINISHED_KEPT
from deployments.replica.timings import Timings
from tests.deployments.replica.doubles import INFO, WAIT_S, Fixture, until


async def test_it_reports_loading_then_ready(idle: Fixture) -> None:
    idle.engine.loaded.clear()
    starting = asyncio.create_task(idle.replica.start())
    loading = await idle.manager.until(lambda snapshot: True)
    assert (loading.phase, loading.info, loading.pool) == (Phase.LOADING, None, "decode-small")
    idle.engine.loaded.set()
    await asyncio.wait_for(starting, WAIT_S)
    ready = await idle.manager.until(lambda snapshot: snapshot.phase is Phase.READY)
    assert ready.info is not None
    assert (ready.info.replica_id, ready.info.role, ready.info.total_blocks) == ("r0", Role.DECODE, 100)
    assert ready.info.endpoints == INFO.endpoints
    assert ready.counters["bytes_written"] == 7.0
    assert {snapshot.phase for snapshot in idle.manager.snapshots} == {Phase.LOADING, Phase.READY}


def _counts(blocks: int, snapshot: ReplicaSnapshot) -> bool:
    return snapshot.counters.get("n") == blocks


async def test_versions_grow_over_a_restart_too(up: Fixture) -> None:
    for blocks in range(1, 6):
        up.engine.put(counters={"n": blocks})
        await up.manager.until(partial(_counts, blocks))
    versions = [snapshot.version for snapshot in up.manager.snapshots]
    assert all(later > earlier for earlier, later in itertools.pairwise(versions))
    again = Fixture()
    await again.replica.start()
    assert (await again.manager.until(lambda snapshot: True)).version > versions[-1]
    await again.replica.stop()


async def test_no_change_is_lost_between_two_reports(up: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change right after a snapshot is news at the next interval, not at the next heartbeat."""
    taken: list[float | None] = []
    report = up.manager.ask

    async def report_then_change(call: Report) -> ReportAnswer:
        answer: ReportAnswer = await report(call)
        if len(taken) < 5:
            taken.append(call.snapshot.counters.get("n"))
            up.engine.put(counters={"n": 100 + len(taken)})
            await until(lambda: up.replica._readings.load.counters["n"] == 100 + len(taken))
        return answer

    monkeypatch.setattr(up.manager, "ask", report_then_change)
    up.engine.put(counters={"n": 100})
    await up.manager.until(lambda snapshot: snapshot.counters.get("n") == 105)


@pytest.mark.parametrize("idle", [{"timings": Timings(heartbeat_s=0.005)}], indirect=True)
async def test_a_quiet_replica_still_says_that_it_lives(up: Fixture) -> None:
    up.engine.put(counters={"n": 1})
    await up.manager.until(lambda snapshot: snapshot.counters.get("n") == 1)
    count = len(up.manager.snapshots)
    await until(lambda: len(up.manager.snapshots) > count + 3)


@pytest.fixture
async def seldom(up: Fixture) -> Fixture:
    """The manager wants to hear of it once an hour."""
    up.manager.interval_s = 3600.0
    up.engine.put(counters={"n": 1})
    await up.manager.until(lambda snapshot: snapshot.counters.get("n") == 1)
    return up


async def test_it_reports_no_more_often_than_the_manager_lets_it(seldom: Fixture) -> None:
    count = len(seldom.manager.snapshots)
    run = await seldom.begin("a")
    seldom.engine.put(("a", 1, True), counters={"n": 2})
    assert await asyncio.wait_for(run, WAIT_S) == "finished"
    await asyncio.sleep(0.05)
    assert len(seldom.manager.snapshots) == count


async def test_a_replica_that_leaves_does_not_wait_to_be_asked(seldom: Fixture) -> None:
    seldom.replica.begin_drain()
    await seldom.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)


async def test_no_ended_part_is_lost_where_reports_are_seldom(seldom: Fixture) -> None:
    """The log of ended parts is bounded, and told of before it is full."""
    for number in range(FINISHED_KEPT + 10):
        run = await seldom.begin(f"a{number}")
        seldom.engine.put((f"a{number}", 1, True))
        await asyncio.wait_for(run, WAIT_S)
        await asyncio.sleep(0.001)
    told = {part.session_id for snapshot in seldom.manager.snapshots for part in snapshot.finished}
    assert len(told) >= FINISHED_KEPT
    assert len(seldom.manager.snapshots) < 10


async def test_an_unreachable_manager_is_told_later(up: Fixture) -> None:
    await up.manager.until(lambda snapshot: snapshot.phase is Phase.READY)
    up.manager.outage = Unavailable("restarting")
    up.engine.put(counters={"n": 3})
    await until(lambda: up.manager.refused)
    up.manager.outage = None
    up.engine.put(counters={"n": 4})
    await up.manager.until(lambda snapshot: snapshot.counters.get("n") == 4)
    up.replica.check_health()


@pytest.mark.parametrize("idle", [{"rebalance": False}], indirect=True)
async def test_where_none_may_move_it_does_not_say_what_its_sessions_hold(up: Fixture) -> None:
    run = await up.begin("a", movable=True)
    up.engine.put(("a", 3, False))
    up.engine.put(("a", 1, True))
    await asyncio.wait_for(run, WAIT_S)
    await up.manager.until(lambda snapshot: snapshot.finished_version == 1)
    assert not any(snapshot.held_tokens or snapshot.movable for snapshot in up.manager.snapshots)


@pytest.mark.parametrize("idle", [{"overcommit": 1.5, "rebalance": False}, {"rebalance": True}], indirect=True)
async def test_it_lets_go_what_the_manager_says_and_tells_it_what_its_sessions_hold(up: Fixture) -> None:
    runs = [await up.begin(name, movable=name == "a") for name in "ab"]
    up.engine.put(("a", 3, False))
    told = await up.manager.until(lambda snapshot: snapshot.held_tokens == (33, 0))
    assert told.movable == {"s-a"}
    up.manager.move = ("s-a", "s-b")
    up.engine.put(("b", 1, False))
    assert await asyncio.wait_for(runs[0], WAIT_S) == MOVED
    await up.manager.until(lambda snapshot: snapshot.sessions == ("s-b",))
    up.engine.put(("b", 1, True))
    await asyncio.wait_for(runs[1], WAIT_S)


async def test_it_tells_what_its_engine_caches(up: Fixture) -> None:
    told = [snapshot.cache for snapshot in up.manager.snapshots if snapshot.cache is not None]
    assert told == [CacheChange(1, whole=True)]
    up.engine.cache.stored([1, 2])
    up.engine.put(cached_blocks=9, used_blocks=4)
    then = await up.manager.until(lambda snapshot: snapshot.cache is not None and snapshot.cache.sequence > 1)
    assert then.cache == CacheChange(2, stored=(1, 2))
    assert then.cached_blocks in (5, 9)  # an idle engine uses no block, even if its last step said so


async def test_it_tells_the_whole_when_the_manager_missed_something(up: Fixture) -> None:
    up.engine.cache.stored([1, 2])
    up.engine.put()
    told = (await up.manager.until(lambda s: s.cache is not None and set(s.cache.stored) == {1, 2})).cache
    assert told is not None
    up.manager.resync = True
    up.engine.put()
    again = await up.manager.until(lambda s: s.cache is not None and s.cache.sequence > told.sequence)
    assert again.cache is not None
    assert (again.cache.whole, set(again.cache.stored)) == (True, {1, 2})
    count = len(up.manager.snapshots)
    up.engine.put()
    after = await up.manager.until(lambda snapshot: len(up.manager.snapshots) > count)
    assert after.cache is None, "once is enough"


async def test_what_an_outage_swallowed_is_told_after_it(up: Fixture) -> None:
    up.manager.outage = Unavailable("gone")
    up.engine.cache.stored([1])
    up.engine.put()
    await until(lambda: up.manager.refused)
    up.manager.outage = None
    up.engine.put()
    told = await up.manager.until(lambda s: s.cache is not None and s.cache.sequence > 1)
    assert told.cache is not None
    assert (told.cache.whole, told.cache.stored) == (True, (1,))


async def test_a_replica_that_is_held_does_not_press_a_manager_that_is_away(idle: Fixture) -> None:
    idle.manager.held = {Phase.LOADING}
    starting = asyncio.create_task(idle.replica.start())
    await idle.manager.until(lambda snapshot: snapshot.info is not None)
    idle.manager.outage = Unavailable("gone")
    await until(lambda: idle.manager.refused)
    await asyncio.sleep(0.1)  # 20 intervals
    assert idle.manager.refused == 1, "the next is for its heartbeat"
    assert not starting.done()
    starting.cancel()


@pytest.mark.parametrize("idle", [{"timings": Timings(heartbeat_s=0.005)}], indirect=True)
async def test_an_operator_takes_a_replica_out_of_service_and_puts_it_back(up: Fixture) -> None:
    run = await up.begin("a")
    up.manager.drain = True
    await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)
    up.engine.put(("a", 1, True))
    assert await asyncio.wait_for(run, WAIT_S) == "finished", "what is there is served"
    up.manager.drain = None
    count = len(up.manager.snapshots)
    await until(lambda: len(up.manager.snapshots) > count + 3)
    assert up.manager.last.phase is Phase.DRAINING, "the replica stays so when it is told nothing"
    up.manager.drain = False
    await up.manager.until(lambda snapshot: snapshot.phase is Phase.READY)


@pytest.mark.parametrize("idle", [{"timings": Timings(heartbeat_s=0.005)}], indirect=True)
@pytest.mark.parametrize("drained", [False, True])
async def test_a_replica_that_serve_stops_is_not_put_back(up: Fixture, drained: bool) -> None:
    if drained:
        up.manager.drain = True
        await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)
    up.replica.begin_drain()
    up.manager.drain = False
    await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)
    count = len(up.manager.snapshots)
    await until(lambda: len(up.manager.snapshots) > count + 3)
    assert {snapshot.phase for snapshot in up.manager.snapshots[count:]} == {Phase.DRAINING}
