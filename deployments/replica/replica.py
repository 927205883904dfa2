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
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

from configs.schema import PlacementConfig
from deployments.engine.protocol import Engine, EngineError, EngineLoad, Identity, Output, Step
from deployments.errors import Unavailable
from deployments.host.waits import set_within
from deployments.messages import (
    MOVED,
    Finished,
    Peers,
    Phase,
    ReplicaInfo,
    ReplicaSnapshot,
    ReportAnswer,
    Reservation,
    SessionReport,
    SessionTask,
    StepSample,
)
from deployments.output_stream import OutputSender

logger = logging.getLogger("baton.replica")

HEARTBEAT_S = 1.0
REPORT_TIMEOUT_S = 5.0
CANCEL_AGAIN_S = 0.5
STEPS_KEPT = 64
FINISHED_KEPT = 64
TURN_TIMEOUT_S = 600.0
PAIR_TIMEOUT_S = 2.0
"""What is placed here before Serve knows of it waits, `router.APPEAR_S` at most."""


class ReportPort(Protocol):
    """Where snapshots go: the session manager. Raises Unavailable."""

    async def report(self, snapshot: ReplicaSnapshot) -> ReportAnswer: ...


@dataclass(slots=True)
class _Live:
    task: SessionTask
    done: asyncio.Future[str]
    output_tokens: int = 0
    started: bool = False
    moves: bool = False
    orphaned: bool = False

    @property
    def held_tokens(self) -> int:
        """Prompt and answer so far, once there is one."""
        return self.task.prompt_tokens + self.output_tokens if self.started else 0

    @property
    def reservation(self) -> Reservation:
        """What it may still take: a prompt with an output is computed."""
        reserved = self.task.reservation
        return reserved.prefilled() if self.started else reserved

    def orphan(self, why: str) -> None:
        """Its ingress is not there any more: nobody reads it, and nobody will close it."""
        self.orphaned = True
        if not self.done.done():
            self.done.set_exception(EngineError(why))


class Replica:
    """Runs sessions on one engine. `start` before anything else, `stop` at the end."""

    def __init__(self, identity: Identity, engine: Engine, port: ReportPort, config: PlacementConfig) -> None:
        self._identity, self._engine, self._port, self._config = identity, engine, port, config
        self._sender = OutputSender(identity.replica_id, config.ingress_lease_s)
        self._live: dict[str, _Live] = {}
        self._info: ReplicaInfo | None = None
        self._phase = Phase.LOADING
        self._load = EngineLoad()
        self._steps: deque[StepSample] = deque(maxlen=STEPS_KEPT)
        self._finished: deque[Finished] = deque(maxlen=FINISHED_KEPT)
        self._finished_version = 0
        self._counters: dict[str, float] = {}
        self._moved_out = 0
        self._counted = False
        self._moved_s = time.monotonic()
        self._version = time.time_ns()  # grows over restarts too
        self._changed, self._urgent = asyncio.Event(), asyncio.Event()
        self._interval_s = config.snapshot_interval_s
        self._told_finished = 0
        self._peers = Peers(0, ())
        self._has_news_of_peers = asyncio.Event()
        self._resync = False
        self._held: dict[Phase, bool] = {}  # what the manager said to the last report from each phase of the start
        self._is_starting = True
        self._has_answer = asyncio.Event()
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Load the engine, telling the manager meanwhile, and wait for its turn. Raises EngineError."""
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
        self._own(self._lease_loop(), "lease")
        self._changed.set()
        await self._while_held(TURN_TIMEOUT_S)
        self._refuse_if_failed()
        self._enter(Phase.READY)
        await self._while_held(PAIR_TIMEOUT_S)
        self._refuse_if_failed()
        self._is_starting = False

    async def _while_held(self, timeout_s: float) -> None:
        """Serve stops an old replica when its successor has started. So that both sides shift in step, one whose engine
        nobody can pair with yet has not started: the old pair serves until a partner is ready as well."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._held.get(self._phase) is not False and self._error is None:
                    self._has_answer.clear()
                    await self._has_answer.wait()

    def _own(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"baton-{name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s of %s ended: %r", task.get_name(), self._identity.replica_id, error)
            self._error = error
            self._enter(Phase.DRAINING)  # Serve replaces us; until then nothing may be placed here
            self._has_answer.set()
            self._fail_open_runs(f"the replica failed: {error}")

    def _fail_open_runs(self, why: str) -> None:
        for live in self._live.values():
            if not live.done.done():
                live.done.set_exception(EngineError(why))

    async def run(self, task: SessionTask) -> SessionReport:
        """One session's part, open until the engine is done with it. Cancelling the call aborts the request.

        Raises EngineError when the engine dies. Outputs go to `task.reply_to`, step by step.
        """
        self._refuse_if_failed()
        if not self._serves:
            raise EngineError(f"the replica is not ready: {self._phase}")
        if not self._live:
            self._moved_s = time.monotonic()
        live = _Live(task, asyncio.get_running_loop().create_future())
        self._live[task.request_id] = live
        self._changed.set()
        outcome = ""
        try:
            async with asyncio.timeout(task.timeout_s):
                if await self._sender.connect(task.reply_to):
                    await self._engine.add(task.request)
                else:
                    live.orphan("the ingress cannot be reached")
                outcome = await live.done
        except TimeoutError:
            outcome = "expired"
        finally:
            self._live.pop(task.request_id, None)
            if live.done.done() and not live.done.cancelled():
                live.done.exception()  # seen, also where the request was refused before anybody waited for it
            self._finished.append(Finished(task.session_id, task.epoch, live.output_tokens, live.orphaned))
            self._finished_version += 1
            self._counted = False
            self._changed.set()
            if self._finished_version - self._told_finished >= FINISHED_KEPT // 2:
                self._urgent.set()
            if outcome != "finished" and self._serves:
                await asyncio.shield(self._engine.abort([task.request_id]))
        return SessionReport(task.session_id, self._identity.replica_id, outcome, live.output_tokens)

    def _refuse_if_failed(self) -> None:
        if self._error is not None:
            raise EngineError(f"the replica failed: {self._error}") from self._error

    @property
    def _serves(self) -> bool:
        """Whether the engine works for sessions: also while draining, for those placed here before that was known."""
        return self._phase is not Phase.LOADING and self._error is None and not self._is_stopping

    def move_out(self, session_ids: Collection[str] | None = None) -> int:
        """Let these sessions go, none named all, as far as they can go on elsewhere. Returns how many will.

        Their runs end with `MOVED`, and their blocks are the prefix cache's, from which this replica then hands them
        over (`SessionTask.hands_over`). One without an output yet, whose KV cache is still on its way here, follows
        at its first.
        """
        live = [each for each in self._live.values() if each.task.movable and not each.done.done()]
        chosen = [each for each in live if session_ids is None or each.task.session_id in session_ids]
        for each in chosen:
            each.moves = True
            self._move_if_started(each)
        return len(chosen)

    def _move_if_started(self, live: _Live) -> None:
        if live.moves and live.started and not live.done.done():
            live.done.set_result(MOVED)
            self._moved_out += 1

    async def _pump(self) -> None:
        """Send each step's outputs on, one message per ingress; nothing of a session whose part is over."""
        while True:
            self._take(await self._engine.step())

    def _take(self, step: Step) -> None:
        self._moved_s = time.monotonic()
        self._load = step.load
        self._steps.extend(step.steps)
        by_ingress: dict[str, list[Output]] = {}
        for output in step.outputs:
            live = self._live.get(output.request_id)
            if live is not None and not live.done.done():
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
            live.orphan("the ingress does not take its outputs")
        elif output.finished:
            live.done.set_result("finished")
        else:
            self._move_if_started(live)

    async def _report_loop(self) -> None:
        """Tell the manager what has changed, at most once per interval, and that we live, once per heartbeat.

        The manager of a large fleet asks for a longer interval, which what is urgent does not wait for.
        """
        while True:
            self._changed.clear()  # before the snapshot: what changes after it is news
            self._urgent.clear()
            self._told_finished = self._finished_version
            await self._refresh_counters()
            snapshot = self._snapshot()
            try:
                async with asyncio.timeout(REPORT_TIMEOUT_S):
                    self._heed(await self._port.report(snapshot), snapshot)
            except (TimeoutError, Unavailable) as error:
                self._resync = True
                if snapshot.info is not None:  # where nobody has ever told, there is nothing to wait for
                    self._held.setdefault(snapshot.phase, False)
                    self._has_answer.set()
                logger.warning("the session manager did not take a snapshot: %r", error)
            interval_s = self._config.snapshot_interval_s
            await asyncio.sleep(interval_s)
            await set_within(self._urgent, self._interval_s - interval_s)
            if self._resync or not self._held.get(self._phase):  # who is held asks again at once, if somebody answers
                await set_within(self._changed, HEARTBEAT_S - max(0.0, self._interval_s - interval_s))

    def _heed(self, answer: ReportAnswer, snapshot: ReplicaSnapshot) -> None:
        self._resync, self._interval_s = answer.resync, answer.interval_s
        if snapshot.info is not None:
            self._held[snapshot.phase] = answer.hold
            self._has_answer.set()
        if answer.resync:
            self._changed.set()
            self._urgent.set()
        if answer.peers is not None:
            self._peers = answer.peers
            self._has_news_of_peers.set()
        if answer.move:
            self.move_out(answer.move)

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

    async def _lease_loop(self) -> None:
        """End the runs of an ingress that is gone: Serve lets a call run on when its caller has died."""
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, self._config.ingress_lease_s / 4))
            gone = self._sender.drop_gone()
            for live in self._live.values() if gone else ():
                if live.task.reply_to in gone:
                    live.orphan("the ingress is gone")

    async def _refresh_counters(self) -> None:
        """Asking costs the engine a moment, so only once after it has fallen idle.

        Then nothing is in use, whatever the engine said in its last step: some say it before they free the blocks.
        """
        if self._serves and not self._live and not self._counted:
            try:
                counters = self._counters = await self._engine.counters()
                self._counted = not counters.get("open_receiving") and not counters.get("open_writing")
            except TimeoutError:  # it has work again; its next idle moment will do
                return

    def _snapshot(self) -> ReplicaSnapshot:
        self._version += 1
        grows = self._config.overcommit > 1
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
            counters=self._counters | self._load.counters | {"moved_out": self._moved_out},
            peers_version=self._peers.version,
            running_tokens=load.running_tokens,
            finished=tuple(self._finished),
            finished_version=self._finished_version,
            steps=steps,
            cached_blocks=max(0, load.cached_blocks - load.used_blocks),  # most blocks in use are cached ones
            cache=None if self._info is None else self._engine.cache_change(whole=self._resync),
            held_tokens=tuple(live.held_tokens for live in self._live.values()) if grows else (),
            movable=frozenset(live.task.session_id for live in self._live.values() if grows and live.task.movable),
            is_starting=self._is_starting,
        )

    async def counters(self) -> dict[str, float]:
        """The engine's and the KV channel's counters, now."""
        return await self._engine.counters()

    def check_health(self) -> None:
        """Raises when the engine or one of our tasks has died: Serve then replaces the replica."""
        self._refuse_if_failed()

    @property
    def open_runs(self) -> int:
        """Sessions that have a part here now."""
        return len(self._live)

    def begin_drain(self) -> None:
        """Say that nothing may be placed here any more. What is here, or on its way here, is served."""
        self._enter(Phase.DRAINING)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._changed.set()
        self._urgent.set()

    async def stop(self) -> None:
        """End the tasks, the open runs and the engine; idempotent."""
        self._phase = Phase.DRAINING
        self._is_stopping = True
        self._fail_open_runs("the replica is stopping")
        tasks, self._tasks = set(self._tasks), []
        while tasks:  # again: Python 3.11's wait_for can lose a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_S)
        await self._engine.shutdown()
        self._sender.close()
