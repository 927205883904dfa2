"""An engine that hangs is given up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from configs.schema import PlacementConfig
from deployments.engine.protocol import EngineError
from deployments.messages import SessionTask
from deployments.replica import watch
from deployments.replica.parts import Part, Parts
from deployments.replica.timings import Timings
from tests.deployments.replica.doubles import Ingress, ScriptedEngine, until

LIMIT_S = 0.02


class Clock:
    """Takes the place of `time` and of `asyncio` in the watch: time passes only while the watch sleeps.

    `in_sleep`: what happens in each sleep.
    """

    timeout = staticmethod(asyncio.timeout)

    def __init__(self) -> None:
        self.now_s = 0.0
        self.in_sleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.in_sleep()
        await asyncio.sleep(0)


class Watched(ScriptedEngine):
    """Notes when it is asked. While `is_deaf` is set, it never answers."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.is_deaf = False
        self.asked_s: list[float] = []

    async def counters(self) -> dict[str, float]:
        self.asked_s.append(self._clock.now_s)
        if self.is_deaf:
            await asyncio.Event().wait()
        return await super().counters()


class Alone:
    """A watch in a time of its own, and what it watches."""

    def __init__(self, clock: Clock, heartbeat_s: float = 1000.0) -> None:
        self.clock, self.engine, self.parts = clock, Watched(clock), Parts()
        self.watch = watch.Watch(self.engine, self.parts, PlacementConfig(hang_timeout_s=LIMIT_S), Timings(heartbeat_s))

    def begin(self, request_id: str) -> Part:
        return self.parts.begin(SessionTask(f"s-{request_id}", 1, "r0", request_id, (), 60.0, 30), Ingress(), 1)

    async def run(self, loop: Coroutine[Any, Any, None], until_s: float) -> None:
        """Run a loop until that time, or until it ends."""
        running = asyncio.create_task(loop)
        await until(lambda: running.done() or self.clock.now_s >= until_s)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Alone:
    """A parameter: the heartbeat."""
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "asyncio", clock)
    return Alone(clock, **getattr(request, "param", {}))


@pytest.mark.parametrize("alone", [{}, {"heartbeat_s": LIMIT_S / 10}], indirect=True)
async def test_an_engine_that_neither_moves_nor_answers_is_given_up_after_its_time(alone: Alone) -> None:
    alone.begin("a")
    alone.engine.is_deaf = True
    with pytest.raises(EngineError, match=r"has not moved for 0\.02 s"):
        await alone.run(alone.watch.hang_loop(), 10 * LIMIT_S)
    assert alone.engine.asked_s[0] >= LIMIT_S / 2
    assert LIMIT_S < alone.clock.now_s <= 1.5 * LIMIT_S


async def test_an_engine_that_answers_is_not_given_up_and_is_asked_seldom(alone: Alone) -> None:
    alone.begin("a")
    await alone.run(alone.watch.hang_loop(), 10 * LIMIT_S)
    asked = [0.0, *alone.engine.asked_s]
    assert len(asked) > 10
    assert all(later - earlier > 0.4 * LIMIT_S for earlier, later in itertools.pairwise(asked))


async def test_an_engine_that_makes_steps_is_not_asked(alone: Alone) -> None:
    alone.begin("a")
    alone.clock.in_sleep = alone.watch.progressed
    await alone.run(alone.watch.hang_loop(), 10 * LIMIT_S)
    assert not alone.engine.asked_s


async def test_an_engine_without_sessions_is_not_asked(alone: Alone) -> None:
    alone.engine.is_deaf = True
    await alone.run(alone.watch.hang_loop(), 10 * LIMIT_S)
    assert not alone.engine.asked_s
