"""A replica around a scripted engine: what it reports, refuses, aborts, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from configs.schema import PlacementConfig
from deployments.engine.cache_log import CacheLog
from deployments.engine.protocol import EngineError, EngineInfo, EngineLoad, Identity, Output, Step
from deployments.errors import Unavailable
from deployments.manager.calls import Call, Report
from deployments.messages import (
    MOVED,
    CacheChange,
    Finished,
    Peers,
    Phase,
    ReplicaSnapshot,
    ReportAnswer,
    Reservation,
    Role,
    SessionTask,
    StepSample,
)
from deployments.output_stream import OutputReceiver
from deployments.replica.parts import FINISHED_KEPT
from deployments.replica.readings import STEPS_KEPT
from deployments.replica.replica import Replica
from deployments.replica.timings import Timings
from deployments.serve.router import APPEAR_S

WAIT_S = 60.0
LEASE_S = 0.8
SLOW = Timings(heartbeat_s=1000.0)
"""The heart beats too slowly to help."""
INFO = EngineInfo("f1", 16, 100, 8, 2048, ("tcp://127.0.0.1:1",))


class ScriptedEngine:
    """Does what the test says, and notes what it is asked."""

    def __init__(self) -> None:
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.steps: asyncio.Queue[Step | EngineError] = asyncio.Queue()
        self.added: list[tuple[bytes, ...]] = []
        self.aborted: list[str] = []
        self.met: list[Sequence[tuple[str, ...]]] = []
        self.is_busy = False
        self.shutdowns = 0
        self.refusal: EngineError | None = None
        self.start_error: EngineError | None = None
        self.cache = CacheLog()

    async def start(self) -> EngineInfo:
        await self.loaded.wait()
        if self.start_error is not None:
            raise self.start_error
        return INFO

    async def add(self, frames: tuple[bytes, ...]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.added.append(frames)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def step(self) -> Step:
        step = await self.steps.get()
        if isinstance(step, EngineError):
            raise step
        return step

    def encode(self, payloads: list[Any]) -> list[bytes]:
        return [repr(payloads).encode()]

    async def meet(self, peers: Sequence[tuple[str, ...]]) -> None:
        if self.is_busy:
            self.is_busy = False
            raise TimeoutError
        self.met.append(peers)

    def cache_change(self, whole: bool) -> CacheChange | None:
        return self.cache.change(whole)

    async def counters(self) -> dict[str, float]:
        return {"bytes_written": 7.0, "open_receiving": 0.0, "open_writing": 0.0}

    async def shutdown(self) -> None:
        self.shutdowns += 1

    def put(self, *outputs: tuple[str, int, bool], steps: tuple[StepSample, ...] = (), **load: Any) -> None:
        taken = tuple(Output(*output, payload=output) for output in outputs)
        self.steps.put_nowait(Step(taken, EngineLoad(**load), steps))


class Manager:
    """Takes snapshots; `outage` is raised instead."""

    def __init__(self) -> None:
        self.snapshots: list[ReplicaSnapshot] = []
        self.outage: Unavailable | None = None
        self.peers: Peers | None = None
        self.resync, self.held = False, set[Phase]()
        self.move: tuple[str, ...] = ()
        self.interval_s = 0.0
        self.refused = 0
        self._came = asyncio.Event()

    async def ask(self, call: Call[Any]) -> Any:
        assert isinstance(call, Report), "a replica asks for nothing else"
        snapshot = call.snapshot
        if self.outage is not None:
            self.refused += 1
            raise self.outage
        self.snapshots.append(snapshot)
        self._came.set()
        resync, self.resync = self.resync, False
        peers = self.peers if self.peers and self.peers.version != snapshot.peers_version else None
        return ReportAnswer(peers, resync, snapshot.phase in self.held, self.move, self.interval_s)

    @property
    def last(self) -> ReplicaSnapshot:
        return self.snapshots[-1]

    async def until(self, condition: Callable[[ReplicaSnapshot], bool]) -> ReplicaSnapshot:
        async with asyncio.timeout(WAIT_S):
            while not (self.snapshots and condition(self.last)):
                self._came.clear()
                await self._came.wait()
        return self.last


class Fixture:
    """A replica, its engine, the manager and an ingress."""

    def __init__(self, timings: Timings = SLOW, overcommit: float = 1.0) -> None:
        self.engine, self.manager = ScriptedEngine(), Manager()
        identity = Identity("r0", "decode-small", Role.DECODE, "node", "127.0.0.1")
        config = PlacementConfig(snapshot_interval_s=0.005, ingress_lease_s=LEASE_S, overcommit=overcommit)
        self.replica = Replica(identity, self.engine, self.manager, config, timings)
        self.ingress = OutputReceiver("127.0.0.1")

    def task(self, request_id: str = "a", timeout_s: float = 60.0, **changes: Any) -> SessionTask:
        request = (request_id.encode(),)
        address = changes.get("reply_to", self.ingress.address)
        reserved = changes.get("reservation", Reservation(4, 3, 40, 30, 0.5))
        movable = changes.get("movable", False)
        return SessionTask(f"s-{request_id}", 1, "r0", request_id, request, address, timeout_s, 30, reserved, movable)

    async def begin(self, request_id: str = "a", **changes: Any) -> asyncio.Task[Any]:
        """A run that the engine has taken."""
        run = asyncio.create_task(self.replica.run(self.task(request_id, **changes)))
        await until(lambda: (request_id.encode(),) in self.engine.added)
        return run


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def receive(ingress: OutputReceiver) -> tuple[str, list[bytes]]:
    return await asyncio.wait_for(ingress.receive(), WAIT_S)


@pytest.fixture
async def idle(no_leaks: None, request: pytest.FixtureRequest) -> AsyncIterator[Fixture]:
    """A replica that is not started. A parameter: what the fixture is made with."""
    fixture = Fixture(**getattr(request, "param", {}))
    yield fixture
    await asyncio.wait_for(fixture.replica.stop(), WAIT_S)
    fixture.ingress.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


@pytest.fixture
async def up(idle: Fixture) -> Fixture:
    await idle.replica.start()
    return idle


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
    again.ingress.close()


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
    assert (await asyncio.wait_for(run, WAIT_S)).outcome == "finished"
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


async def test_it_refuses_runs_before_it_is_ready_and_after_it_stopped(idle: Fixture) -> None:
    with pytest.raises(EngineError, match="not ready: loading model"):
        await idle.replica.run(idle.task())
    await idle.replica.start()
    await idle.replica.stop()
    with pytest.raises(EngineError, match="not ready: draining"):
        await idle.replica.run(idle.task())
    assert not idle.engine.added


async def test_a_run_ends_with_the_last_output(up: Fixture) -> None:
    run = await up.begin("a")
    other = await up.begin("b")
    listed = await up.manager.until(lambda snapshot: len(snapshot.sessions) == 2)
    assert listed.backlog_tokens == 60
    assert listed.reservations == (Reservation(4, 3, 40, 30, 0.5),) * 2
    up.engine.put(("a", 1, False), ("b", 1, False), ("nobody", 1, False), used_blocks=4, running=2, waiting=1)
    up.engine.put(("a", 2, True), used_blocks=2, running=1)
    report = await asyncio.wait_for(run, WAIT_S)
    assert (report.session_id, report.replica_id, report.outcome, report.output_tokens) == ("s-a", "r0", "finished", 3)
    name, frames = await receive(up.ingress)
    assert (name, frames) == ("r0", [repr([("a", 1, False), ("b", 1, False)]).encode()])
    assert (await receive(up.ingress))[1] == [repr([("a", 2, True)]).encode()]
    last = await up.manager.until(lambda snapshot: snapshot.sessions == ("s-b",))
    assert (last.used_blocks, last.running, last.waiting, last.backlog_tokens) == (2, 1, 0, 0)
    assert last.reservations == (Reservation(4, 3, 40),), "its prompt is computed"
    assert not up.engine.aborted
    up.engine.put(("b", 1, True))
    await asyncio.wait_for(other, WAIT_S)
    await up.manager.until(lambda snapshot: snapshot.sessions == ())


async def test_each_ingress_gets_its_own(up: Fixture) -> None:
    second = OutputReceiver("127.0.0.1")
    runs = [await up.begin("a"), await up.begin("b", reply_to=second.address)]
    up.engine.put(("a", 1, True), ("b", 1, True))
    assert (await receive(up.ingress))[1] == [repr([("a", 1, True)]).encode()]
    assert (await receive(second))[1] == [repr([("b", 1, True)]).encode()]
    await asyncio.wait_for(asyncio.gather(*runs), WAIT_S)
    second.close()


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
    assert (await receive(up.ingress))[1] == [repr([("b", 1, True)]).encode()]


async def test_a_run_that_takes_too_long_expires(up: Fixture) -> None:
    report = await asyncio.wait_for(up.replica.run(up.task("a", timeout_s=0.01)), WAIT_S)
    assert report.outcome == "expired"
    assert up.engine.aborted == ["a"]


async def test_a_request_that_the_engine_refuses_harms_nobody_else(up: Fixture) -> None:
    other = await up.begin("b")
    up.engine.refusal = EngineError("not a request")
    with pytest.raises(EngineError, match="not a request"):
        await up.replica.run(up.task("a"))
    up.replica.check_health()
    up.engine.put(("b", 1, True))
    assert (await asyncio.wait_for(other, WAIT_S)).outcome == "finished"


async def test_a_part_that_is_over_gives_no_more_outputs(up: Fixture) -> None:
    """What came before may be lost by then, and another replica goes on: an answer must not get a gap."""
    run, other = await up.begin("a", movable=True), await up.begin("b")
    up.engine.put(("a", 1, False))
    assert (await receive(up.ingress))[1] == [repr([("a", 1, False)]).encode()]
    assert up.replica.move_out() == 1
    late = tuple(Output(name, 1, True, payload=(name, 1, True)) for name in "ab")
    up.replica._take(Step(late, EngineLoad()))  # before the run itself has noticed
    report = await asyncio.wait_for(run, WAIT_S)
    assert (report.outcome, report.output_tokens) == (MOVED, 1)
    assert (await asyncio.wait_for(other, WAIT_S)).outcome == "finished"
    assert (await receive(up.ingress))[1] == [repr([("b", 1, True)]).encode()]


async def test_sessions_are_let_go_once_they_have_begun(up: Fixture) -> None:
    runs = {name: await up.begin(name, movable=name != "c") for name in "abcd"}
    up.engine.put(("a", 2, False), ("b", 1, False), ("c", 1, False))
    await until(lambda: up.replica._parts.open["a"].started)
    assert up.replica.move_out(["s-a", "s-c", "s-d", "s-nobody"]) == 2
    report = await asyncio.wait_for(runs["a"], WAIT_S)
    assert (report.outcome, report.output_tokens) == (MOVED, 2)
    assert up.engine.aborted == ["a"], "it has given its blocks back when it says so"
    up.engine.put(("d", 1, False), ("c", 1, False))
    assert (await asyncio.wait_for(runs["d"], WAIT_S)).outcome == MOVED
    told = await up.manager.until(lambda snapshot: snapshot.counters.get("moved_out") == 2)
    assert told.sessions == ("s-b", "s-c")
    assert told.finished[-1] == Finished("s-d", 1, 1)
    assert up.replica.move_out() == 1
    assert (await asyncio.wait_for(runs["b"], WAIT_S)).outcome == MOVED
    up.engine.put(("c", 1, True))
    assert (await asyncio.wait_for(runs["c"], WAIT_S)).outcome == "finished"
    assert up.replica.move_out() == 0


@pytest.mark.parametrize("idle", [{"overcommit": 1.5}], indirect=True)
async def test_it_lets_go_what_the_manager_says_and_tells_it_what_its_sessions_hold(up: Fixture) -> None:
    runs = [await up.begin(name, movable=name == "a") for name in "ab"]
    up.engine.put(("a", 3, False))
    told = await up.manager.until(lambda snapshot: snapshot.held_tokens == (33, 0))
    assert told.movable == {"s-a"}
    up.manager.move = ("s-a", "s-b")
    up.engine.put(("b", 1, False))
    assert (await asyncio.wait_for(runs[0], WAIT_S)).outcome == MOVED
    await up.manager.until(lambda snapshot: snapshot.sessions == ("s-b",))
    up.engine.put(("b", 1, True))
    await asyncio.wait_for(runs[1], WAIT_S)


async def test_an_ingress_that_takes_nothing_loses_its_session(up: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await up.begin("a")
    monkeypatch.setattr(up.replica._sender, "send", lambda address, frames: False)
    up.engine.put(("a", 1, False))
    with pytest.raises(EngineError, match="the ingress does not take its outputs"):
        await asyncio.wait_for(run, WAIT_S)
    assert up.engine.aborted == ["a"]
    up.replica.check_health()


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
    """Its process is stopped, say: connections stay, and nobody moves."""
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


async def test_an_ingress_that_cannot_be_reached(up: Fixture) -> None:
    with pytest.raises(EngineError, match="the ingress cannot be reached"):
        await asyncio.wait_for(up.replica.run(up.task(reply_to="tcp://127.0.0.1:9")), WAIT_S)
    assert not up.engine.added
    told = await up.manager.until(lambda snapshot: bool(snapshot.finished))
    assert told.finished == (Finished("s-a", 1, 0, orphaned=True),)


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
        await up.replica.run(up.task("c"))
    assert not up.engine.aborted, "a dead engine is asked nothing"
    await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)  # nothing may be placed on it


async def test_an_engine_that_dies_while_it_takes_a_request_leaves_no_error_that_nobody_saw(up: Fixture) -> None:
    said = list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))

    async def add(frames: tuple[bytes, ...]) -> None:
        up.engine.steps.put_nowait(EngineError("out of memory"))
        await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)
        raise EngineError("the engine is dead")

    up.engine.add = add  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the engine is dead"):
        await up.replica.run(up.task("a"))
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


@pytest.mark.parametrize("idle", [{"timings": Timings(heartbeat_s=0.01)}], indirect=True)
async def test_its_engine_meets_the_peers_that_the_manager_names_once(idle: Fixture) -> None:
    idle.engine.is_busy = True  # at first
    idle.manager.peers = Peers(7, (("tcp://one",), ("tcp://two",)))
    await idle.replica.start()
    await idle.manager.until(lambda snapshot: snapshot.peers_version == 7)
    await until(lambda: bool(idle.engine.met))
    count = len(idle.manager.snapshots)
    await idle.manager.until(lambda snapshot: len(idle.manager.snapshots) > count + 2)
    assert idle.engine.met == [idle.manager.peers.endpoints]
    idle.manager.peers = Peers(8, ())
    await until(lambda: idle.engine.met[-1] == ())


async def test_an_idle_engine_uses_nothing_whatever_it_said_last(up: Fixture) -> None:
    run = asyncio.create_task(up.replica.run(up.task("a")))
    await until(lambda: bool(up.engine.added))
    up.engine.put(("a", 1, True), used_blocks=40, running=1)
    assert (await asyncio.wait_for(run, WAIT_S)).outcome == "finished"
    idle = await up.manager.until(lambda snapshot: not snapshot.sessions and not snapshot.used_blocks)
    assert (idle.running, idle.waiting) == (0, 0)


async def test_it_tells_what_its_engine_caches(up: Fixture) -> None:
    told = [snapshot.cache for snapshot in up.manager.snapshots if snapshot.cache is not None]
    assert told == [CacheChange(1, whole=True)]
    up.engine.cache.stored([1, 2])
    up.engine.put(cached_blocks=9, used_blocks=4)
    then = await up.manager.until(lambda snapshot: snapshot.cache is not None and snapshot.cache.sequence > 1)
    assert then.cache == CacheChange(2, stored=(1, 2))
    assert then.cached_blocks in (5, 9)  # an idle engine uses no block, whatever it said last


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
        await up.replica.run(up.task("c"))
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
            await up.replica.run(up.task(f"r{number}"))
    told = await up.manager.until(lambda snapshot: snapshot.finished_version == count)
    assert [part.session_id for part in told.finished] == [f"s-r{number}" for number in range(6, count)]


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


async def test_a_replica_that_leaves_says_so_and_serves_what_was_placed_on_it(up: Fixture) -> None:
    run = await up.begin("a")
    up.replica.begin_drain()
    await up.manager.until(lambda snapshot: snapshot.phase is Phase.DRAINING)
    late = await up.begin("b")
    assert up.replica.open_runs == 2
    up.engine.put(("a", 1, True), ("b", 1, True))
    assert [(await asyncio.wait_for(each, WAIT_S)).outcome for each in (run, late)] == ["finished"] * 2
    left = await up.manager.until(lambda snapshot: not snapshot.sessions)
    assert left.phase is Phase.DRAINING
