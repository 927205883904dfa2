"""A replica with an engine and a manager that do what the test says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from configs.schema import PlacementConfig
from deployments.engine.cache_log import CacheLog
from deployments.engine.protocol import EngineError, EngineInfo, EngineLoad, Identity, Output, Step, WorkerSpans
from deployments.errors import Unavailable
from deployments.manager.calls import Brought, Call, HandOn, Report
from deployments.messages import (
    BeginCopy,
    BeginPin,
    Bring,
    CacheChange,
    HeldAdapters,
    Peers,
    Phase,
    Pin,
    PinList,
    ReplicaInfo,
    ReplicaSnapshot,
    ReportAnswer,
    Reservation,
    Role,
    SessionTask,
    StepSample,
)
from deployments.replica.replica import Replica
from deployments.replica.timings import Timings

WAIT_S = 60.0
SLOW = Timings(heartbeat_s=1000.0)
"""The heart beats too slowly to help."""
INFO = EngineInfo("f1", 16, 100, 8, 2048, ("tcp://127.0.0.1:1",))


class ScriptedEngine:
    """Does what the test says, and notes what it is asked. `looks`: how often its counters were asked for.

    `calls`: what was added and aborted, in order.
    """

    def __init__(self) -> None:
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.steps: asyncio.Queue[Step | EngineError] = asyncio.Queue()
        self.added: list[tuple[bytes, ...]] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.brought: list[Bring] = []
        self.met: list[Sequence[tuple[str, ...]]] = []
        self.is_busy = self.answers_late = False
        self.kv = {"bytes_written": 7.0, "open_receiving": 0.0, "open_writing": 0.0}
        self.looks = 0
        self.shutdowns = 0
        self.refusal: EngineError | None = None
        self.start_error: EngineError | None = None
        self.cache = CacheLog()
        self.pins: list[tuple[str, tuple[str, ...], str, str]] = []

    async def start(self) -> EngineInfo:
        await self.loaded.wait()
        if self.start_error is not None:
            raise self.start_error
        return INFO

    async def add(self, frames: tuple[bytes, ...]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.added.append(frames)
        self.calls.append(("add", frames[0].decode()))

    async def pin(
        self, request_id: str, keep: Collection[str], pin: Pin | None = None, source: ReplicaInfo | None = None
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        named = (pin.id if pin else "", source.replica_id if source else "")
        self.pins.append((request_id, tuple(keep), *named))

    def hashes(self, frames: tuple[bytes, ...]) -> tuple[int, ...]:
        """A block for each byte."""
        return tuple(frames[0])

    async def bring(self, bring: Bring) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.brought.append(bring)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        self.calls += [("abort", request_id) for request_id in request_ids]

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

    def adapters(self) -> HeldAdapters:
        return HeldAdapters()

    async def spans(self, session_ids: list[str]) -> list[WorkerSpans]:
        return [(0.0, {session: [] for session in session_ids})]

    def cache_change(self, whole: bool) -> CacheChange | None:
        return self.cache.change(whole)

    async def counters(self) -> dict[str, float]:
        self.looks += 1
        if self.answers_late:
            raise TimeoutError
        return dict(self.kv)

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
        self.drain: bool | None = None
        self.pins = PinList()
        self.begin_pin: BeginPin | None = None
        self.bring: tuple[Bring, ...] = ()
        self.brought: list[Brought] = []
        self.handed_on: list[HandOn] = []
        self.goes_on = asyncio.Event()
        self.copy: BeginCopy | None = None
        self.refused = 0
        self._came = asyncio.Event()

    async def ask(self, call: Call[Any]) -> Any:
        if self.outage is not None:
            self.refused += 1
            raise self.outage
        if isinstance(call, HandOn):
            self.handed_on.append(call)
            await self.goes_on.wait()
            return 3
        if isinstance(call, Brought):
            self.brought.append(call)
            return None
        assert isinstance(call, Report), "a replica asks for nothing else"
        snapshot = call.snapshot
        self.snapshots.append(snapshot)
        self._came.set()
        resync, self.resync = self.resync, False
        peers = self.peers if self.peers and self.peers.version != snapshot.peers_version else None
        pins = self.pins if self.pins.version != snapshot.pins_version else None
        hold, (bring, self.bring) = snapshot.phase in self.held, (self.bring, ())
        told = peers, resync, hold, self.move, self.interval_s, self.drain, pins, self.begin_pin, bring, self.copy
        return ReportAnswer(*told)

    @property
    def last(self) -> ReplicaSnapshot:
        return self.snapshots[-1]

    async def until(self, condition: Callable[[ReplicaSnapshot], bool]) -> ReplicaSnapshot:
        async with asyncio.timeout(WAIT_S):
            while not (self.snapshots and condition(self.last)):
                self._came.clear()
                await self._came.wait()
        return self.last


class Ingress:
    """Notes what a replica gives it: the frames of each step, and the numbers of the parts that end with them.

    `takes`: it is there, and takes outputs.
    """

    def __init__(self) -> None:
        self.given: asyncio.Queue[tuple[list[bytes], list[int]]] = asyncio.Queue()
        self.takes = True

    def give(self, frames: list[bytes], finished: Sequence[int] = ()) -> bool:
        if self.takes:
            self.given.put_nowait((frames, list(finished)))
        return self.takes

    async def frames(self) -> list[bytes]:
        """Those of the next step."""
        return (await asyncio.wait_for(self.given.get(), WAIT_S))[0]


class Fixture:
    """A replica, its engine, the manager and an ingress."""

    def __init__(self, timings: Timings = SLOW, **placement: Any) -> None:
        self.engine, self.manager = ScriptedEngine(), Manager()
        identity = Identity("r0", "decode-small", Role.DECODE, "node", "127.0.0.1")
        config = PlacementConfig(snapshot_interval_s=0.005, **placement)
        self.replica = Replica(identity, self.engine, self.manager, config, timings)
        self.ingress = Ingress()
        self._numbers = itertools.count(1)

    def task(self, request_id: str = "a", timeout_s: float = 60.0, **changes: Any) -> SessionTask:
        request = (request_id.encode(),)
        reserved = changes.get("reservation", Reservation(4, 3, 40, 30, 0.5))
        movable, let_go = changes.get("movable", False), changes.get("let_go", ())
        what = f"s-{request_id}", 1, "r0", request_id, request, timeout_s, 30, reserved, movable
        return SessionTask(*what, let_go=let_go)

    async def run(self, request_id: str = "a", ingress: Ingress | None = None, **changes: Any) -> str:
        """Run a part, numbered from 1."""
        return await self.replica.run(self.task(request_id, **changes), ingress or self.ingress, next(self._numbers))

    async def begin(self, request_id: str = "a", **changes: Any) -> asyncio.Task[Any]:
        """A run that the engine has taken."""
        run = asyncio.create_task(self.run(request_id, **changes))
        await until(lambda: (request_id.encode(),) in self.engine.added)
        return run


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)
