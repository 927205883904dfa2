"""Ingresses that are gone lose their sessions, and an engine that hangs is given up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from configs.schema import PlacementConfig
from deployments.engine.protocol import EngineError
from deployments.messages import Finished, SessionTask
from deployments.output_stream import OutputReceiver, OutputSender
from deployments.replica import watch
from deployments.replica.parts import Part, Parts
from deployments.replica.timings import Timings
from tests.deployments.replica.doubles import LEASE_S, WAIT_S, Fixture, ScriptedEngine, receive, until


async def test_an_ingress_that_dies_ends_its_runs_and_no_others(up: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = OutputReceiver("127.0.0.1")
    mine, other = await up.begin("a", reply_to=dying.address), await up.begin("b")
    up.engine.put(("a", 1, False), ("b", 1, False))
    await receive(dying)
    dying.close()
    with pytest.raises(EngineError, match="the ingress is gone"):
        await asyncio.wait_for(mine, WAIT_S)
    assert up.engine.aborted == ["a"]
    told = await up.manager.until(lambda snapshot: snapshot.sessions == ("s-b",))
    assert told.finished == (Finished("s-a", 1, 1, orphaned=True),)
    assert list(up.replica._sender._sockets) == [up.ingress.address]
    up.engine.put(("b", 1, True))
    assert (await asyncio.wait_for(other, WAIT_S)).outcome == "finished"


@pytest.mark.slow
async def test_an_ingress_that_does_not_answer_is_gone_after_its_lease(up: Fixture) -> None:
    """Its process is stopped, say: its connections stay open, and it reads nothing."""
    mute = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
    code = (
        f"import time, zmq; s = zmq.Context().socket(zmq.PULL); s.bind({address!r}); print(flush=True); time.sleep(999)"
    )
    mute.close()
    ingress = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    try:
        assert ingress.stdout is not None
        await asyncio.wait_for(ingress.stdout.readline(), WAIT_S)
        run = await up.begin("a", reply_to=address)
        await asyncio.sleep(2 * LEASE_S)
        assert not run.done()
        ingress.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineError, match="the ingress is gone"):
            await asyncio.wait_for(run, WAIT_S)
    finally:
        ingress.kill()
        await ingress.wait()


# ---- the watch alone, in a time of its own

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
    """A watch, and what it watches."""

    def __init__(self, clock: Clock, heartbeat_s: float = 1000.0) -> None:
        self.clock, self.engine, self.parts = clock, Watched(clock), Parts()
        self.sender = OutputSender("r0", LEASE_S)
        config = PlacementConfig(hang_timeout_s=LIMIT_S, ingress_lease_s=LEASE_S)
        self.watch = watch.Watch(self.engine, self.sender, self.parts, config, Timings(heartbeat_s))

    def begin(self, request_id: str, reply_to: str = "tcp://one") -> Part:
        return self.parts.begin(SessionTask(f"s-{request_id}", 1, "r0", request_id, (), reply_to, 60.0, 30))

    async def run(self, loop: Coroutine[Any, Any, None], until_s: float) -> None:
        """Run a loop until that time, or until it ends."""
        running = asyncio.create_task(loop)
        await until(lambda: running.done() or self.clock.now_s >= until_s)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Alone]:
    """A parameter: the heartbeat."""
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "asyncio", clock)
    made = Alone(clock, **getattr(request, "param", {}))
    yield made
    made.sender.close()


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


@pytest.mark.parametrize("alone", [{}, {"heartbeat_s": LEASE_S / 10}], indirect=True)
async def test_all_parts_of_an_ingress_that_is_gone_end_and_a_lease_has_several_looks(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = [alone.begin(name) for name in "ab"], alone.begin("c", "tcp://two")
    looked_s = [0.0]

    def drop_gone() -> list[str]:
        looked_s.append(alone.clock.now_s)
        return ["tcp://one"] if alone.clock.now_s > 3 * LEASE_S else []

    monkeypatch.setattr(alone.sender, "drop_gone", drop_gone)
    await alone.run(alone.watch.lease_loop(), 5 * LEASE_S)
    assert all(part.orphaned and isinstance(part.done.exception(), EngineError) for part in mine)
    assert not other.done.done()
    assert all(later - earlier < 0.3 * LEASE_S for earlier, later in itertools.pairwise(looked_s))
