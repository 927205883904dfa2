"""What an engine said of itself, as a replica reports it."""

from __future__ import annotations

import asyncio

from deployments.messages import StepSample
from deployments.replica.readings import STEPS_KEPT
from tests.deployments.replica.doubles import WAIT_S, Fixture, until


async def test_an_idle_engine_uses_nothing_whatever_it_said_last(up: Fixture) -> None:
    run = asyncio.create_task(up.replica.run(up.task("a")))
    await until(lambda: bool(up.engine.added))
    up.engine.put(("a", 1, True), used_blocks=40, running=1)
    assert (await asyncio.wait_for(run, WAIT_S)).outcome == "finished"
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
