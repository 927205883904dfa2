"""A start that the manager holds back, and what ends the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from deployments.engine.protocol import EngineError
from deployments.errors import Unavailable
from deployments.messages import Phase
from deployments.replica.lifecycle import Lifecycle
from deployments.replica.timings import Timings
from deployments.serve.router import APPEAR_S
from tests.deployments.replica.doubles import SLOW, WAIT_S, Fixture, until


@pytest.mark.parametrize("idle", [{"timings": Timings(heartbeat_s=2 * WAIT_S)}], indirect=True)
async def test_a_replica_that_is_held_is_not_ready_and_asks_again(idle: Fixture) -> None:
    idle.manager.held = {Phase.LOADING}
    starting = asyncio.create_task(idle.replica.start())
    loaded = await idle.manager.until(lambda snapshot: snapshot.info is not None)
    count = len(idle.manager.snapshots)
    await until(lambda: len(idle.manager.snapshots) > count + 3)
    assert not starting.done()
    assert {loaded.phase, idle.manager.last.phase} == {Phase.LOADING}
    with pytest.raises(EngineError, match="not ready"):
        await idle.run()
    idle.manager.held.clear()
    await asyncio.wait_for(starting, WAIT_S)
    await idle.manager.until(lambda snapshot: snapshot.phase is Phase.READY)


@pytest.mark.parametrize("idle", [{"timings": replace(SLOW, pair_timeout_s=2 * WAIT_S)}], indirect=True)
async def test_a_replica_is_ready_before_serve_knows_of_it(idle: Fixture) -> None:
    idle.manager.held = {Phase.READY}
    starting = asyncio.create_task(idle.replica.start())
    await idle.manager.until(lambda snapshot: snapshot.phase is Phase.READY)
    count = len(idle.manager.snapshots)
    await until(lambda: len(idle.manager.snapshots) > count + 3)
    assert not starting.done()
    assert idle.manager.last.is_starting
    run = await idle.begin("a")
    idle.manager.held.clear()
    await asyncio.wait_for(starting, WAIT_S)
    idle.engine.put(("a", 1, True))
    assert await run == "finished"
    await idle.manager.until(lambda snapshot: not snapshot.is_starting)


@pytest.mark.parametrize("idle", [{"timings": replace(SLOW, pair_timeout_s=0.05)}], indirect=True)
async def test_a_replica_that_is_ready_does_not_wait_long_for_another(idle: Fixture) -> None:
    idle.manager.held = {Phase.READY}
    await asyncio.wait_for(idle.replica.start(), WAIT_S)


def test_what_is_placed_on_a_replica_that_waits_for_another_outlasts_that() -> None:
    assert 2 * Timings().pair_timeout_s < APPEAR_S, "and Serve has as long to tell its handles"


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.READY])
async def test_a_replica_whose_engine_dies_while_it_is_held_does_not_start(idle: Fixture, phase: Phase) -> None:
    idle.manager.held = {phase}
    starting = asyncio.create_task(idle.replica.start())
    await idle.manager.until(lambda snapshot: snapshot.info is not None and snapshot.phase is phase)
    idle.engine.steps.put_nowait(EngineError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        await asyncio.wait_for(starting, WAIT_S)


async def test_a_replica_does_not_wait_for_a_manager_that_is_away(idle: Fixture) -> None:
    idle.manager.outage = Unavailable("away")
    await asyncio.wait_for(idle.replica.start(), WAIT_S)


# ---- the lifecycle alone


@pytest.mark.parametrize(("phase", "serves"), [(Phase.LOADING, False), (Phase.READY, True), (Phase.DRAINING, True)])
def test_it_serves_while_it_is_ready_and_while_it_drains_until_it_stops(phase: Phase, serves: bool) -> None:
    life = Lifecycle()
    assert life.phase is Phase.LOADING
    life.phase = phase
    assert life.serves is serves
    life.is_stopping = True
    assert not life.serves


async def test_a_replica_that_failed_drains_serves_nothing_and_waits_for_nothing() -> None:
    life, error = Lifecycle(), ValueError("out of memory")
    life.phase = Phase.READY
    life.refuse_if_failed()  # it has not failed
    life.fail(error)
    assert (life.phase, life.serves) == (Phase.DRAINING, False)
    with pytest.raises(EngineError, match="the replica failed: out of memory") as refused:
        life.refuse_if_failed()
    assert refused.value.__cause__ is error
    life.heard(life.phase, hold=True)
    with pytest.raises(EngineError, match="out of memory"):
        await asyncio.wait_for(life.while_held(2 * WAIT_S), WAIT_S)


def test_it_is_held_by_the_last_answer_to_a_report_from_its_phase() -> None:
    life = Lifecycle()
    assert not life.is_held, "no answer yet"
    life.heard(Phase.LOADING, hold=True)
    assert life.is_held
    life.phase = Phase.READY
    assert not life.is_held
    life.heard(Phase.READY, hold=True)
    assert life.is_held
    life.heard(Phase.LOADING, hold=False)
    assert life.is_held
    life.heard(Phase.READY, hold=False)
    assert not life.is_held


def wait_on(phase: Phase) -> Callable[[Lifecycle], None]:
    return lambda life: life.heard(phase, hold=True)


def go_on(phase: Phase) -> Callable[[Lifecycle], None]:
    return lambda life: life.heard(phase, hold=False)


def silence(phase: Phase) -> Callable[[Lifecycle], None]:
    return lambda life: life.unheard(phase)


@pytest.mark.parametrize(
    ("news", "goes_on"),
    [
        ([], False),  # the manager has not been asked yet
        ([go_on(Phase.LOADING)], True),
        ([wait_on(Phase.LOADING)], False),
        ([wait_on(Phase.LOADING), go_on(Phase.LOADING)], True),
        ([silence(Phase.LOADING)], True),
        ([wait_on(Phase.LOADING), silence(Phase.LOADING)], False),  # what it said last stands
        ([silence(Phase.LOADING), wait_on(Phase.LOADING)], False),
        ([go_on(Phase.READY)], False),  # the answer to another phase
        ([silence(Phase.READY)], False),
    ],
)
@pytest.mark.parametrize("is_early", [True, False])
async def test_a_start_goes_on_when_the_manager_lets_it_or_never_said_to_wait(
    news: list[Callable[[Lifecycle], None]], goes_on: bool, is_early: bool
) -> None:
    """`is_early`: all of the news comes before the wait begins."""
    life = Lifecycle()
    if is_early:
        for each in news:
            each(life)
    waiting = asyncio.create_task(life.while_held(2 * WAIT_S))
    await _turns()
    if not is_early:
        assert not waiting.done()
        for each in news:
            each(life)
        await _turns()
    assert waiting.done() == goes_on
    life.heard(Phase.LOADING, hold=False)
    await asyncio.wait_for(waiting, WAIT_S)


async def _turns() -> None:
    """Let every task go as far as it can without news."""
    for _ in range(10):
        await asyncio.sleep(0)
