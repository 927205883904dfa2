"""What an engine said of itself, as a replica reports it."""

from __future__ import annotations

import asyncio

import pytest

from deployments.engine.protocol import EngineLoad, Step
from deployments.messages import StepSample
from deployments.replica.readings import STEPS_KEPT, Readings
from tests.deployments.replica.doubles import WAIT_S, Fixture, ScriptedEngine, until


async def test_an_idle_engine_uses_nothing_even_if_its_last_step_said_so(up: Fixture) -> None:
    run = asyncio.create_task(up.run("a"))
    await until(lambda: bool(up.engine.added))
    up.engine.put(("a", 1, True), used_blocks=40, running=1)
    assert await asyncio.wait_for(run, WAIT_S) == "finished"
    idle = await up.manager.until(lambda snapshot: not snapshot.sessions and not snapshot.used_blocks)
    assert (idle.running, idle.waiting) == (0, 0)


def samples(count: int) -> tuple[StepSample, ...]:
    return tuple(StepSample(1.0 + number, decode_sequences=1) for number in range(count))


async def test_each_step_is_told_of_once_and_in_order(up: Fixture) -> None:
    first, second, third = samples(3)
    up.engine.put(steps=(first, second))
    await up.manager.until(lambda snapshot: second in snapshot.steps)
    up.engine.put(steps=(third,))
    await up.manager.until(lambda snapshot: third in snapshot.steps)
    up.engine.put(counters={"n": 1})
    await up.manager.until(lambda snapshot: snapshot.counters.get("n") == 1)
    assert [step for snapshot in up.manager.snapshots for step in snapshot.steps] == [first, second, third]


async def test_of_many_steps_the_newest_are_told(up: Fixture) -> None:
    up.engine.put(steps=samples(200))
    told = await up.manager.until(lambda snapshot: bool(snapshot.steps))
    assert told.steps == samples(200)[-STEPS_KEPT:]


async def test_it_tells_the_tokens_that_its_running_sequences_hold(up: Fixture) -> None:
    run = await up.begin("a")
    up.engine.put(("a", 1, False), running=1, running_tokens=31)
    await up.manager.until(lambda snapshot: snapshot.running_tokens == 31)
    up.engine.put(("a", 1, True), running=1, running_tokens=32)
    await asyncio.wait_for(run, WAIT_S)
    await up.manager.until(lambda snapshot: not snapshot.sessions and snapshot.running_tokens == 0)


# ---- the readings alone

BUSY = EngineLoad(used_blocks=4, running=2, waiting=1, cached_blocks=9, running_tokens=31, counters={"n": 1.0})
QUIET = EngineLoad(cached_blocks=9, counters={"n": 1.0})


def taken(engine: ScriptedEngine) -> Readings:
    """The readings of an engine that was busy in its last step."""
    readings = Readings(engine)
    readings.take(Step((), BUSY))
    return readings


async def test_the_last_step_counts_until_the_counters_are_read_and_again_after_a_session() -> None:
    readings = taken(ScriptedEngine())
    assert readings.idle_load == BUSY
    await readings.settle()
    assert readings.idle_load == QUIET
    assert readings.load == BUSY, "it stays what the engine said"
    readings.unsettle()
    assert readings.idle_load == BUSY


@pytest.mark.parametrize("name", ["open_receiving", "open_writing"])
async def test_the_last_step_counts_while_a_transfer_is_open(name: str) -> None:
    engine = ScriptedEngine()
    readings = taken(engine)
    engine.kv[name] = 1.0
    await readings.settle()
    assert (readings.idle_load, readings.counters[name]) == (BUSY, 1.0)
    engine.kv[name] = 0.0
    await readings.settle()
    assert (readings.idle_load, readings.counters[name]) == (QUIET, 0.0)


async def test_an_idle_engine_is_asked_for_its_counters_once() -> None:
    engine = ScriptedEngine()
    readings = taken(engine)
    for looks in (1, 2):
        for _ in range(3):
            await readings.settle()
        assert engine.looks == looks
        readings.unsettle()


async def test_an_engine_that_answers_late_is_asked_again_and_its_old_counters_stay() -> None:
    engine = ScriptedEngine()
    readings = taken(engine)
    await readings.settle()
    assert readings.counters == {**engine.kv, "n": 1.0}, "the channel's and the engine's"
    before, engine.kv["bytes_written"] = readings.counters, 8.0
    readings.unsettle()
    engine.answers_late = True
    await readings.settle()
    assert (readings.counters, readings.idle_load) == (before, BUSY)
    engine.answers_late = False
    await readings.settle()
    assert (readings.counters["bytes_written"], readings.idle_load) == (8.0, QUIET)
