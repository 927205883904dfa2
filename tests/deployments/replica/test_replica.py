"""A replica around a scripted engine: which runs it takes, where their outputs go, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from dataclasses import replace

import pytest

from deployments.engine.protocol import EngineError, EngineLoad, Output, Step
from deployments.messages import MOVED, Finished, Phase, Reservation
from tests.deployments.replica.doubles import WAIT_S, Fixture, Ingress


async def test_it_refuses_runs_before_it_is_ready_and_after_it_stopped(idle: Fixture) -> None:
    with pytest.raises(EngineError, match="not ready: loading model"):
        await idle.run()
    await idle.replica.start()
    await idle.replica.stop()
    with pytest.raises(EngineError, match="not ready: draining"):
        await idle.run()
    assert not idle.engine.added


async def test_it_refuses_what_was_placed_on_another_replica(up: Fixture) -> None:
    """Which may have had the same address."""
    task = replace(up.task(), replica_id="r9")
    with pytest.raises(EngineError, match="this is r0, and not r9"):
        await up.replica.run(task, up.ingress, 1)
    assert not up.engine.added


async def test_a_run_ends_with_the_last_output(up: Fixture) -> None:
    run = await up.begin("a")
    other = await up.begin("b")
    listed = await up.manager.until(lambda snapshot: len(snapshot.sessions) == 2)
    assert listed.backlog_tokens == 60
    assert listed.reservations == (Reservation(4, 3, 40, 30, 0.5),) * 2
    up.engine.put(("a", 1, False), ("b", 1, False), ("unknown", 1, False), used_blocks=4, running=2, waiting=1)
    up.engine.put(("a", 2, True), used_blocks=2, running=1)
    outcome = await asyncio.wait_for(run, WAIT_S)
    assert outcome == "finished"
    assert up.ingress.given.get_nowait() == ([repr([("a", 1, False), ("b", 1, False)]).encode()], [])
    assert up.ingress.given.get_nowait() == ([repr([("a", 2, True)]).encode()], [1])
    last = await up.manager.until(lambda snapshot: snapshot.sessions == ("s-b",))
    assert (last.used_blocks, last.running, last.waiting, last.backlog_tokens) == (2, 1, 0, 0)
    assert last.reservations == (Reservation(4, 3, 40),), "its prompt is computed"
    assert not up.engine.aborted
    up.engine.put(("b", 1, True))
    await asyncio.wait_for(other, WAIT_S)
    await up.manager.until(lambda snapshot: snapshot.sessions == ())


async def test_each_ingress_gets_its_own(up: Fixture) -> None:
    second = Ingress()
    runs = [await up.begin("a"), await up.begin("b", ingress=second)]
    up.engine.put(("a", 1, True), ("b", 1, True))
    await asyncio.wait_for(asyncio.gather(*runs), WAIT_S)
    assert up.ingress.given.get_nowait() == ([repr([("a", 1, True)]).encode()], [1])
    assert second.given.get_nowait() == ([repr([("b", 1, True)]).encode()], [2])


async def test_cancelling_a_run_aborts_the_request(up: Fixture) -> None:
    run = await up.begin("a")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert up.engine.aborted == ["a"]
    await up.manager.until(lambda snapshot: snapshot.sessions == ())
    up.engine.put(("a", 1, True))  # late: it goes nowhere
    other = await up.begin("b")
    up.engine.put(("b", 1, True))
    await asyncio.wait_for(other, WAIT_S)
    assert await up.ingress.frames() == [repr([("b", 1, True)]).encode()]


async def test_a_run_that_takes_too_long_expires(up: Fixture) -> None:
    outcome = await asyncio.wait_for(up.run("a", timeout_s=0.01), WAIT_S)
    assert outcome == "expired"
    assert up.engine.aborted == ["a"]


async def test_a_request_that_the_engine_refuses_harms_no_other(up: Fixture) -> None:
    other = await up.begin("b")
    up.engine.refusal = EngineError("not a request")
    with pytest.raises(EngineError, match="not a request"):
        await up.run("a")
    up.replica.check_health()
    up.engine.put(("b", 1, True))
    assert await asyncio.wait_for(other, WAIT_S) == "finished"


async def test_a_part_that_is_over_gives_no_more_outputs(up: Fixture) -> None:
    """What came before may be lost by then, and another replica goes on: an answer must not get a gap."""
    run, other = await up.begin("a", movable=True), await up.begin("b")
    up.engine.put(("a", 1, False))
    assert await up.ingress.frames() == [repr([("a", 1, False)]).encode()]
    assert up.replica.move_out() == 1
    late = tuple(Output(name, 1, True, payload=(name, 1, True)) for name in "ab")
    up.replica._take(Step(late, EngineLoad()))  # before the run itself has noticed
    outcome = await asyncio.wait_for(run, WAIT_S)
    assert outcome == MOVED
    assert await asyncio.wait_for(other, WAIT_S) == "finished"
    assert await up.ingress.frames() == [repr([("b", 1, True)]).encode()]


async def test_an_ingress_that_takes_nothing_loses_its_session(up: Fixture) -> None:
    run = await up.begin("a")
    up.ingress.takes = False
    up.engine.put(("a", 1, False))
    with pytest.raises(EngineError, match="the ingress does not take its outputs"):
        await asyncio.wait_for(run, WAIT_S)
    assert up.engine.aborted == ["a"]
    up.replica.check_health()


async def test_an_ingress_that_dies_ends_its_runs_and_no_others(up: Fixture) -> None:
    dying = Ingress()
    mine, other = await up.begin("a", ingress=dying), await up.begin("b")
    up.engine.put(("a", 1, False), ("b", 1, False))
    await dying.frames()
    up.replica.orphan(dying)
    with pytest.raises(EngineError, match="the ingress is gone"):
        await asyncio.wait_for(mine, WAIT_S)
    assert up.engine.aborted == ["a"]
    told = await up.manager.until(lambda snapshot: snapshot.sessions == ("s-b",))
    assert told.finished == (Finished("s-a", 1, 1, orphaned=True),)
    up.engine.put(("b", 1, True))
    assert await asyncio.wait_for(other, WAIT_S) == "finished"


async def test_a_dead_engine_fails_open_runs_and_the_health_check(up: Fixture) -> None:
    runs = [await up.begin(name) for name in "ab"]
    up.replica.check_health()
    up.engine.steps.put_nowait(EngineError("out of memory"))
    for run in runs:
        with pytest.raises(EngineError, match="the replica failed: out of memory"):
            await asyncio.wait_for(run, WAIT_S)
    for _ in range(2):
        with pytest.raises(EngineError, match="out of memory"):
            up.replica.check_health()
    with pytest.raises(EngineError, match="out of memory"):
        await up.run("c")
    assert not up.engine.aborted, "a dead engine is asked nothing"
    await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)  # nothing may be placed on it


async def test_an_engine_that_dies_while_it_takes_a_request_leaves_no_error_unread(up: Fixture) -> None:
    said = list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))

    async def add(frames: tuple[bytes, ...]) -> None:
        up.engine.steps.put_nowait(EngineError("out of memory"))
        await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)
        raise EngineError("the engine is dead")

    up.engine.add = add  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the engine is dead"):
        await up.run("a")
    gc.collect()
    assert not said


async def test_an_engine_that_does_not_start(idle: Fixture) -> None:
    idle.engine.start_error = EngineError("no such model")
    with pytest.raises(EngineError, match="no such model"):
        await idle.replica.start()
    assert idle.replica._life.phase is Phase.LOADING


async def test_stopping_ends_everything_and_can_be_repeated(up: Fixture) -> None:
    run = await up.begin("a")
    await asyncio.wait_for(up.replica.stop(), WAIT_S)
    with pytest.raises(EngineError, match="the replica is stopping"):
        await asyncio.wait_for(run, WAIT_S)
    await asyncio.wait_for(up.replica.stop(), WAIT_S)
    assert up.engine.shutdowns == 2
    assert asyncio.all_tasks() == {asyncio.current_task()}
    count = len(up.manager.snapshots)
    await asyncio.sleep(0.05)
    assert len(up.manager.snapshots) == count


async def test_stopping_while_it_loads(idle: Fixture) -> None:
    idle.engine.loaded.clear()
    starting = asyncio.create_task(idle.replica.start())
    await idle.manager.until(lambda snapshot: True)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    await asyncio.wait_for(idle.replica.stop(), WAIT_S)
    assert idle.engine.shutdowns == 1


@pytest.mark.parametrize("turns", range(8))
async def test_stopping_at_the_moment_that_something_changes(idle: Fixture, turns: int) -> None:
    """A cancellation must not be lost when what a task waits for comes in the same turn of the loop."""
    await idle.replica.start()
    run = await idle.begin("a")
    await idle.manager.until(lambda snapshot: snapshot.sessions == ("s-a",))
    idle.engine.put(("a", 1, True), used_blocks=1)
    for _ in range(turns):
        await asyncio.sleep(0)
    await asyncio.wait_for(idle.replica.stop(), WAIT_S)
    await asyncio.wait([run], timeout=WAIT_S)
    assert run.done()
    run.exception()


async def test_a_replica_that_leaves_says_so_and_serves_what_was_placed_on_it(up: Fixture) -> None:
    run = await up.begin("a")
    up.replica.begin_drain()
    await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)
    late = await up.begin("b")
    assert up.replica.open_runs == 2
    up.engine.put(("a", 1, True), ("b", 1, True))
    assert [await asyncio.wait_for(each, WAIT_S) for each in (run, late)] == ["finished"] * 2
    left = await up.manager.until(lambda snapshot: not snapshot.sessions)
    assert left.phase is Phase.DRAINING
