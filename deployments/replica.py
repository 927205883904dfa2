"""A prefill or decode replica: an engine core, the sessions on it, and what it tells the session manager.

Both roles are the same shell around an engine; what differs is in the engine's KV connector and in the requests
they get. Plain Python: `app/main.py` makes a Serve deployment of `ServeReplica`, tests build `Replica` without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

from configs.schema import PlacementConfig
from deployments.engine.protocol import Engine, EngineError, EngineLoad, Output, Step
from deployments.errors import Unavailable
from deployments.messages import (
    Finished,
    Peers,
    Phase,
    ReplicaInfo,
    ReplicaSnapshot,
    ReportAnswer,
    Reservation,
    Role,
    SessionReport,
    SessionTask,
    StepSample,
)
from deployments.wire import OutputSender

logger = logging.getLogger("baton.replica")

HEARTBEAT_S = 1.0
REPORT_TIMEOUT_S = 5.0
CANCEL_AGAIN_S = 0.5
STEPS_KEPT = 64
FINISHED_KEPT = 64


class ReportPort(Protocol):
    """Where snapshots go: the session manager. Raises Unavailable."""

    async def report(self, snapshot: ReplicaSnapshot) -> ReportAnswer: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Who and where a replica is. `host`: the address its peers reach it at."""

    replica_id: str
    pool: str
    role: Role
    node_id: str
    host: str


@dataclass(slots=True)
class _Live:
    task: SessionTask
    done: asyncio.Future[str]
    output_tokens: int = 0
    started: bool = False

    @property
    def reservation(self) -> Reservation:
        """What it may still take: a prompt with an output is computed."""
        reserved = self.task.reservation
        return reserved.prefilled() if self.started else reserved


class Replica:
    """Runs sessions on one engine. `start` before anything else, `stop` at the end."""

    def __init__(self, identity: Identity, engine: Engine, port: ReportPort, config: PlacementConfig) -> None:
        self._identity, self._engine, self._port, self._config = identity, engine, port, config
        self._sender = OutputSender(identity.replica_id)
        self._live: dict[str, _Live] = {}
        self._info: ReplicaInfo | None = None
        self._phase = Phase.LOADING
        self._load = EngineLoad()
        self._steps: deque[StepSample] = deque(maxlen=STEPS_KEPT)
        self._finished: deque[Finished] = deque(maxlen=FINISHED_KEPT)
        self._finished_version = 0
        self._counters: dict[str, float] = {}
        self._counted = False
        self._moved_s = time.monotonic()
        self._version = time.time_ns()  # grows over restarts too
        self._changed = asyncio.Event()
        self._peers = Peers(0, ())
        self._has_news_of_peers = asyncio.Event()
        self._resync = False
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Load the engine, telling the manager meanwhile. Raises EngineError."""
        self._own(self._report_loop(), "report")
        engine = await self._engine.start()
        self._info = ReplicaInfo(
            replica_id=self._identity.replica_id,
            pool=self._identity.pool,
            role=self._identity.role,
            node_id=self._identity.node_id,
            fingerprint=engine.fingerprint,
            block_size=engine.block_size,
            total_blocks=engine.total_blocks,
            max_sessions=engine.max_sessions,
            max_model_len=engine.max_model_len,
            endpoints=engine.endpoints,
            chunk_tokens=engine.chunk_tokens,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            prior=engine.prior,
        )
        self._own(self._pump(), "pump")
        self._own(self._meet_loop(), "meet")
        self._own(self._watch_loop(), "watch")
        self._phase = Phase.READY
        self._changed.set()

    def _own(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"baton-{name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s of %s ended: %r", task.get_name(), self._identity.replica_id, error)
            self._error = error
            self._phase = Phase.DRAINING  # Serve replaces us; until then nothing may be placed here
            self._changed.set()
            self._fail_open_runs(f"the replica failed: {error}")

    def _fail_open_runs(self, why: str) -> None:
        for live in self._live.values():
            if not live.done.done():
                live.done.set_exception(EngineError(why))

    async def run(self, task: SessionTask) -> SessionReport:
        """One session's part, open until the engine is done with it. Cancelling the call aborts the request.

        Raises EngineError when the engine dies. Outputs go to `task.reply_to`, step by step.
        """
        self._refuse_if_unwell()
        if not self._live:
            self._moved_s = time.monotonic()
        live = _Live(task, asyncio.get_running_loop().create_future())
        self._live[task.request_id] = live
        self._changed.set()
        finished = False
        try:
            async with asyncio.timeout(task.timeout_s):
                await self._engine.add(task.request)
                outcome = await live.done
                finished = True
        except TimeoutError:
            outcome = "expired"
        finally:
            self._live.pop(task.request_id, None)
            self._finished.append(Finished(task.session_id, task.epoch, live.output_tokens))
            self._finished_version += 1
            self._counted = False
            self._changed.set()
            if not finished and self._phase is Phase.READY:
                await asyncio.shield(self._engine.abort([task.request_id]))
        return SessionReport(task.session_id, self._identity.replica_id, outcome, live.output_tokens)

    def _refuse_if_unwell(self) -> None:
        if self._error is not None:
            raise EngineError(f"the replica failed: {self._error}") from self._error
        if self._phase is not Phase.READY:
            raise EngineError(f"the replica is not ready: {self._phase}")

    async def _pump(self) -> None:
        """Send each step's outputs on, one message per ingress."""
        while True:
            self._take(await self._engine.step())

    def _take(self, step: Step) -> None:
        self._moved_s = time.monotonic()
        self._load = step.load
        self._steps.extend(step.steps)
        by_ingress: dict[str, list[Output]] = {}
        for output in step.outputs:
            if live := self._live.get(output.request_id):
                by_ingress.setdefault(live.task.reply_to, []).append(output)
        for address, outputs in by_ingress.items():
            sent = self._sender.send(address, self._engine.encode([output.payload for output in outputs]))
            for output in outputs:
                self._settle(output, sent)
        self._changed.set()

    def _settle(self, output: Output, sent: bool) -> None:
        live = self._live[output.request_id]
        live.output_tokens += output.new_tokens
        live.started = True
        if live.done.done():
            return
        if not sent:
            live.done.set_exception(EngineError("the ingress does not take its outputs"))
        elif output.finished:
            live.done.set_result("finished")

    async def _report_loop(self) -> None:
        """Tell the manager what has changed, at most once per interval, and that we live, once per heartbeat."""
        while True:
            self._changed.clear()  # before the snapshot: what changes after it is news
            await self._refresh_counters()
            try:
                async with asyncio.timeout(REPORT_TIMEOUT_S):
                    self._heed(await self._port.report(self._snapshot()))
            except (TimeoutError, Unavailable) as error:
                self._resync = True
                logger.warning("the session manager did not take a snapshot: %r", error)
            await asyncio.sleep(self._config.snapshot_interval_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()

    def _heed(self, answer: ReportAnswer) -> None:
        self._resync = answer.resync
        if answer.resync:
            self._changed.set()
        if answer.peers is not None:
            self._peers = answer.peers
            self._has_news_of_peers.set()

    async def _meet_loop(self) -> None:
        """Make the engine known to its peers before a request needs one, and forget peers that are gone."""
        while True:
            await self._has_news_of_peers.wait()
            self._has_news_of_peers.clear()
            try:
                await self._engine.meet(self._peers.endpoints)
            except TimeoutError:  # it is in a long step
                self._has_news_of_peers.set()
                await asyncio.sleep(HEARTBEAT_S)

    async def _watch_loop(self) -> None:
        """Ask an engine that has sessions and makes no step whether it is there. It answers between two steps.

        Raises EngineError when it has neither answered nor moved for `hang_timeout_s`.
        """
        limit_s = self._config.hang_timeout_s
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, limit_s / 4))
            if not self._live or time.monotonic() - self._moved_s < limit_s / 2:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s / 4):
                    await self._engine.counters()
                self._moved_s = time.monotonic()
            if time.monotonic() - self._moved_s > limit_s:
                raise EngineError(f"the engine has not moved for {limit_s:g} s")

    async def _refresh_counters(self) -> None:
        """Asking costs the engine a moment, so only once after it has fallen idle.

        Then nothing is in use, whatever the engine said in its last step: some say it before they free the blocks.
        """
        if self._phase is Phase.READY and not self._live and not self._counted and self._error is None:
            try:
                counters = self._counters = await self._engine.counters()
                self._counted = not counters.get("open_receiving") and not counters.get("open_writing")
            except TimeoutError:  # it has work again; its next idle moment will do
                return

    def _snapshot(self) -> ReplicaSnapshot:
        self._version += 1
        is_idle = self._counted and not self._live
        load = replace(self._load, used_blocks=0, running=0, waiting=0, running_tokens=0) if is_idle else self._load
        steps = tuple(self._steps)
        self._steps.clear()
        return ReplicaSnapshot(
            replica_id=self._identity.replica_id,
            version=self._version,
            phase=self._phase,
            info=self._info,
            pool=self._identity.pool,
            used_blocks=load.used_blocks,
            running=load.running,
            waiting=load.waiting,
            backlog_tokens=sum(live.task.prompt_tokens for live in self._live.values() if not live.started),
            sessions=tuple(live.task.session_id for live in self._live.values()),
            reservations=tuple(live.reservation for live in self._live.values()),
            counters=self._counters | self._load.counters,
            peers_version=self._peers.version,
            running_tokens=load.running_tokens,
            finished=tuple(self._finished),
            finished_version=self._finished_version,
            steps=steps,
            cached_blocks=max(0, load.cached_blocks - load.used_blocks),  # most blocks in use are cached ones
            cache=None if self._info is None else self._engine.cache_change(whole=self._resync),
        )

    async def counters(self) -> dict[str, float]:
        """The engine's and the KV channel's counters, now."""
        return await self._engine.counters()

    def check_health(self) -> None:
        """Raises when the engine or one of our tasks has died: Serve then replaces the replica."""
        if self._error is not None:
            raise EngineError(f"the replica failed: {self._error}") from self._error

    async def stop(self) -> None:
        """End the tasks, the open runs and the engine; idempotent."""
        self._phase = Phase.DRAINING
        self._fail_open_runs("the replica is stopping")
        tasks, self._tasks = set(self._tasks), []
        while tasks:  # again: Python 3.11's wait_for can lose a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_S)
        await self._engine.shutdown()
        self._sender.close()
