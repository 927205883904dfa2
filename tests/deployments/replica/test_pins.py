"""The prefixes that the manager wants pinned, and what the engine is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from deployments.engine.protocol import EngineLoad, RequestRefused, Step
from deployments.messages import BeginCopy, BeginPin, Pin, PinList, ReplicaInfo, ReportAnswer, Role
from deployments.replica.pins import Pins
from deployments.replica.readings import Readings
from deployments.replica.timings import Timings
from tests.deployments.replica.doubles import Fixture, ScriptedEngine, until

ONE, TWO = Pin("one", tuple(range(33)), 2), Pin("two", tuple(range(20)), 1)
LIST = PinList(7, (ONE, TWO))
SOURCE = ReplicaInfo("r9", "mixed", Role.MIXED, "node", "f1", 16, 100, 8, 2048, ("tcp://nine",))
QUICK = Timings(pin_timeout_s=0.05, pin_again_s=0.05)


class Alone:
    """Pins, whose loop runs, over an engine that does what the test says."""

    def __init__(self, timings: Timings) -> None:
        self.engine = ScriptedEngine()
        self.readings = Readings(self.engine)
        self.pins = Pins("r0", self.engine, self.readings, timings)
        self.loop = asyncio.create_task(self.pins.pin_loop())

    def ends(self, request_id: str, **pinned: int) -> None:
        """The engine is done with a request."""
        self.readings.take(Step((), EngineLoad(pinned=pinned)))
        self.pins.over(request_id)

    async def asked(self, count: int) -> tuple[str, tuple[str, ...], str, str]:
        await until(lambda: len(self.engine.pins) >= count)
        return self.engine.pins[count - 1]


@pytest.fixture
async def alone(request: pytest.FixtureRequest) -> AsyncIterator[Alone]:
    made = Alone(getattr(request, "param", Timings()))
    yield made
    made.loop.cancel()
    await asyncio.wait([made.loop])


async def test_one_prefix_at_a_time_is_computed_or_fetched(alone: Alone) -> None:
    alone.pins.learn(ReportAnswer(pins=LIST, begin_pin=BeginPin("one")))
    first, *what = await alone.asked(1)
    assert what == [("one", "two"), "one", ""]
    alone.pins.learn(ReportAnswer(begin_pin=BeginPin("one")))  # repeated while it does not stand yet
    alone.ends("another request")
    alone.ends(first, one=2)
    await until(lambda: not alone.pins._running)
    alone.pins.learn(ReportAnswer(begin_pin=BeginPin("two", SOURCE)))
    second, *what = await alone.asked(2)
    assert what == [("one", "two"), "two", "r9"]
    assert second != first
    alone.ends(second, one=2, two=1)
    await until(lambda: not alone.pins._running)
    assert len(alone.engine.pins) == 2


async def test_a_hot_prefix_is_fetched_once_and_not_pinned(alone: Alone) -> None:
    hot = replace(ONE, id="")
    alone.pins.learn(ReportAnswer(pins=PinList(7, (TWO,)), copy=BeginCopy(hot, SOURCE)))
    request_id, *what = await alone.asked(1)
    assert what == [("two",), "", "r9"]
    alone.ends(request_id)
    await until(lambda: not alone.pins._running)
    alone.pins.learn(ReportAnswer(begin_pin=BeginPin("two"), copy=BeginCopy(hot, SOURCE)))
    _, *what = await alone.asked(2)
    assert what == [("two",), "two", ""], "what is pinned goes first, and a copy does not wait"
    alone.ends(alone.engine.pins[1][0], two=1)
    await until(lambda: not alone.pins._running)
    assert len(alone.engine.pins) == 2


async def test_what_is_wanted_no_more_is_unpinned(alone: Alone) -> None:
    alone.readings.take(Step((), EngineLoad(pinned={"one": 2, "two": 1})))
    alone.pins.learn(ReportAnswer(pins=LIST))
    alone.pins.learn(ReportAnswer(pins=PinList(8, (TWO,))))
    request_id, *what = await alone.asked(1)
    assert what == [("two",), "", ""]
    alone.ends(request_id, two=1)
    alone.pins.learn(ReportAnswer(pins=PinList(9, (TWO,)), begin_pin=BeginPin("gone")))
    await until(lambda: not alone.pins._has_news.is_set())
    assert len(alone.engine.pins) == 1, "there is nothing to do"


@pytest.mark.parametrize("alone", [QUICK], indirect=True)
async def test_what_does_not_end_is_aborted_and_tried_again_after_a_pause(alone: Alone) -> None:
    alone.pins.learn(ReportAnswer(pins=LIST, begin_pin=BeginPin("one")))
    first, *_ = await alone.asked(1)
    await until(lambda: alone.engine.aborted == [first])
    alone.engine.refusal = RequestRefused("too long")
    await until(lambda: not alone.pins._running)

    def again() -> bool:
        alone.engine.refusal = None
        alone.pins.learn(ReportAnswer(begin_pin=BeginPin("one")))
        return len(alone.engine.pins) == 2

    await until(again)


@pytest.mark.parametrize("alone", [replace(QUICK, pin_timeout_s=60.0, pin_again_s=1000.0)], indirect=True)
async def test_a_replica_that_failed_rests(alone: Alone) -> None:
    alone.pins.learn(ReportAnswer(pins=LIST, begin_pin=BeginPin("one")))
    request_id, *_ = await alone.asked(1)
    alone.ends(request_id, one=1)
    await until(lambda: not alone.pins._running)
    for _ in range(3):
        alone.pins.learn(ReportAnswer(begin_pin=BeginPin("one")))
        await asyncio.sleep(0)
    assert len(alone.engine.pins) == 1


@pytest.mark.parametrize("idle", [{"timings": Timings(heartbeat_s=0.01)}], indirect=True)
async def test_a_replica_reports_what_stands_and_the_list_that_it_has(idle: Fixture) -> None:
    idle.manager.pins = LIST
    await idle.replica.start()
    told = await idle.manager.until(lambda snapshot: snapshot.pins_version == 7)
    assert (told.pinned, told.pins) == ({}, None)
    idle.manager.begin_pin = BeginPin("one")
    await until(lambda: idle.engine.pins)
    idle.engine.put((idle.engine.pins[0][0], 1, True), used_blocks=2, pinned={"one": 2})
    told = await idle.manager.until(lambda snapshot: snapshot.pinned_blocks == 2)
    assert told.used_blocks == 2, "an idle replica holds them"
    idle.manager.begin_pin, idle.manager.resync = None, True
    told = await idle.manager.until(lambda snapshot: snapshot.pins is not None)
    assert told.pins == LIST
