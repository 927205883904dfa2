"""A prefill or decode replica: an engine and the parts of sessions that run on it.

Both roles are the same shell around an engine. They differ in the engine's KV connector and in the requests that they
get. Plain Python: `app/main.py` makes a Serve deployment of `ServeReplica`, tests build `Replica` without Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from typing import Any

from configs.schema import PlacementConfig
from deployments.engine.protocol import (
    Engine,
    EngineError,
    EngineInfo,
    EngineLoad,
    Identity,
    Output,
    Step,
    WorkerSpans,
)
from deployments.link.replica_side import Ingress
from deployments.manager.calls import Manager
from deployments.messages import Phase, ReplicaInfo, SessionTask
from deployments.replica.handing_on import HandingOn
from deployments.replica.lifecycle import Lifecycle, failure
from deployments.replica.parts import Part, Parts
from deployments.replica.peers import Introductions
from deployments.replica.pins import Pins
from deployments.replica.readings import Readings
from deployments.replica.reporter import Reporter
from deployments.replica.timings import TIMINGS, Timings
from deployments.replica.watch import Watch

logger = logging.getLogger("baton.replica")


class Replica:
    """Runs sessions on one engine. Call `start` before anything else, and `stop` at the end."""

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        manager: Manager,
        config: PlacementConfig,
        timings: Timings = TIMINGS,
    ) -> None:
        self._identity, self._engine, self._timings = identity, engine, timings
        self._parts, self._life, self._readings = Parts(), Lifecycle(), Readings(engine)
        self._peers = Introductions(engine, timings)
        self._pins = Pins(identity.replica_id, engine, self._readings, timings)
        self._watch = Watch(engine, self._parts, config, timings)
        self._handing_on = HandingOn(engine, manager, identity.replica_id, config.fetch)
        self._reporter = Reporter(
            identity,
            engine,
            manager,
            config,
            timings,
            self._parts,
            self._life,
            self._readings,
            self._peers,
            self._pins,
            self._handing_on,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the engine, report meanwhile, and wait for this replica's turn. Raises EngineError."""
        self._own(self._reporter.report_loop(), "report")
        self._reporter.info = _info(self._identity, await self._engine.start())
        self._own(self._pump(), "pump")
        self._own(self._peers.meet_loop(), "meet")
        self._own(self._pins.pin_loop(), "pins")
        self._own(self._watch.hang_loop(), "watch")
        self._own(self._handing_on.bring_loop(), "bring")
        self._reporter.tell()
        await self._life.while_held(self._timings.turn_timeout_s)
        self._enter(Phase.READY)
        await self._life.while_held(self._timings.pair_timeout_s)
        self._life.is_starting = False

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"baton-{name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s of %s ended: %r", task.get_name(), self._identity.replica_id, error)
            self._life.fail(error)
            self._reporter.tell(urgently=True)
            self._parts.fail(failure(error))

    async def run(self, task: SessionTask, ingress: Ingress, number: int) -> str:
        """Run one session's part, until the engine is done with it: `finished`, `expired` or `MOVED`.

        Cancelling this aborts the request. `ingress`: gets the outputs, step by step. `number`: what it calls the part.
        Raises EngineError when the engine dies or the ingress is gone, RequestRefused when it cannot take the request.
        """
        self._life.refuse_if_failed()
        if not self._life.serves:
            raise EngineError(f"the replica is not ready: {self._life.phase}")
        if task.replica_id != self._identity.replica_id:  # its address was that of another one before
            raise EngineError(f"this is {self._identity.replica_id}, and not {task.replica_id}")
        if not self._parts.open:
            self._watch.progressed()
        part = self._parts.begin(task, ingress, number)
        self._reporter.tell()
        outcome = ""
        try:
            async with asyncio.timeout(task.timeout_s):
                outcome = await self._outcome(part)
        except TimeoutError:
            outcome = "expired"
        finally:
            self._parts.end(part)
            part.log(outcome)
            self._readings.unsettle()
            self._reporter.tell(urgently=self._parts.is_log_filling)
            if outcome != "finished" and self._life.serves:
                await asyncio.shield(self._engine.abort([task.request_id]))
        return outcome

    async def _outcome(self, part: Part) -> str:
        if part.task.let_go:  # before its own request, so that the engine has their blocks for that in the same step
            await self._engine.abort(self._parts.let_go(part.task.let_go))
        await self._engine.add(part.task.request)
        return await part.done

    def orphan(self, ingress: Ingress) -> None:
        """End the parts of an ingress that is gone."""
        self._parts.orphan(ingress)

    def move_out(self, session_ids: Collection[str] | None = None) -> int:
        """Let these sessions go to other replicas; None means all. Returns the number that can and will move.

        Their parts end with `MOVED`. Their blocks then belong to the prefix cache, from which this replica hands them
        over (`SessionTask.hands_over`). A session without an output yet, whose KV cache is still on its way here, moves
        at its first output.
        """
        return self._parts.move_out(session_ids)

    async def _pump(self) -> None:
        """Send each step's outputs on, one message per ingress."""
        while True:
            self._take(await self._engine.step())

    def _take(self, step: Step) -> None:
        self._watch.progressed()
        self._readings.take(step)
        by_ingress: dict[Ingress, list[tuple[Part, Output]]] = {}
        for output in step.outputs:
            part = self._parts.open.get(output.request_id)
            if part is None:
                self._pins.over(output.request_id)
                self._handing_on.heard(output)
                self._readings.unsettle()
            elif not part.done.done():  # a part that is over sends nothing more
                by_ingress.setdefault(part.ingress, []).append((part, output))
        for ingress, pairs in by_ingress.items():
            finished = [part.number for part, output in pairs if output.finished]
            is_sent = ingress.give(self._engine.encode([output.payload for _, output in pairs]), finished)
            for part, output in pairs:
                self._settle(part, output, is_sent)
        self._reporter.tell()

    def _settle(self, part: Part, output: Output, is_sent: bool) -> None:
        part.output_tokens += output.new_tokens
        if not part.started:
            part.started = True
            self._handing_on.recent.note(part.task)
        if part.done.done():
            return
        if not is_sent:
            part.orphan("the ingress does not take its outputs")
        elif output.finished:
            part.done.set_result("finished")
        else:
            self._parts.move_if_started(part)

    async def counters(self) -> dict[str, float]:
        """The engine's and the KV channel's counters, now."""
        return await self._engine.counters()

    async def spans(self, session_ids: list[str]) -> list[WorkerSpans]:
        """What the KV channels of the engine's workers did for these sessions."""
        return await self._engine.spans(session_ids)

    def check_health(self) -> None:
        """Raises EngineError when the engine or a task of this replica has died: Serve then replaces the replica."""
        self._life.refuse_if_failed()

    @property
    def open_runs(self) -> int:
        """Sessions that have a part here now."""
        return len(self._parts.open)

    @property
    def ended_runs(self) -> int:
        """Parts of sessions that have ended here, however they did."""
        return self._parts.ended_version

    @property
    def load(self) -> EngineLoad:
        """What the engine has to do now."""
        return self._readings.load if self._parts.open else self._readings.idle_load

    @property
    def total_blocks(self) -> int:
        """KV blocks that the engine has; 0 before it is up."""
        return self._reporter.info.total_blocks if self._reporter.info else 0

    @property
    def totals(self) -> dict[str, float]:
        """The engine's and the KV channel's counters as they were last read, and `moved_out`."""
        return self._readings.counters | {"moved_out": self._parts.moved_out}

    async def refresh(self) -> None:
        """Bring `totals` up to date while sessions run. An idle replica does that itself."""
        if self._parts.open:
            await self._readings.refresh()

    def begin_drain(self) -> None:
        """Tell the manager to place nothing here any more. What is here, or on its way here, is served."""
        self._life.leave()
        self._reporter.tell(urgently=True)

    async def hand_on(self, left_s: float) -> None:
        """Have other replicas fetch what is hottest in this one's cache, while it leaves; see `HandingOn.hand_on`."""
        await self._handing_on.hand_on(left_s)

    def _enter(self, phase: Phase) -> None:
        self._life.phase = phase
        self._reporter.tell(urgently=True)

    async def stop(self) -> None:
        """End the tasks, the open parts and the engine; idempotent."""
        self._life.leave()
        self._life.is_stopping = True
        self._parts.fail(EngineError("the replica is stopping"))
        tasks, self._tasks = set(self._tasks), []
        while tasks:  # repeated, because Python 3.11's wait_for can lose a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=self._timings.cancel_again_s)
        await self._engine.shutdown()


def _info(identity: Identity, engine: EngineInfo) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=identity.replica_id,
        pool=identity.pool,
        role=identity.role,
        node_id=identity.node_id,
        fingerprint=engine.fingerprint,
        block_size=engine.block_size,
        total_blocks=engine.total_blocks,
        max_sessions=engine.max_sessions,
        max_model_len=engine.max_model_len,
        endpoints=engine.endpoints,
        chunk_tokens=engine.chunk_tokens,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        prior=engine.prior,
        strict=identity.strict,
    )
