"""A start that the manager holds back, and what ends the wait."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deployments.engine.protocol import EngineError
from deployments.errors import Unavailable
from deployments.messages import Phase
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
        await idle.replica.run(idle.task())
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
    assert (await run).outcome == "finished"
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
