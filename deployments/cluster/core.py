"""The engine-core client that spans the cluster: what vLLM's frontend takes for its one engine core.

Three calls are the seam: add a request, abort it, get outputs. Below it a request becomes a session: placed by the
session manager, split between a prefill and a decode replica, its two streams of outputs merged into one. A session
that loses a replica is placed again, with what was answered so far: an `_Attempt` is one placement, with a state
machine of its own (`session.py`).
One of the seven files that import vllm.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.cluster import recovery, request_context
from deployments.cluster.engine_request import is_seeded, part, pushed, remainder, session_request, traits
from deployments.cluster.recovery import Again, Limits, Recovery
from deployments.cluster.request_context import RequestContext
from deployments.cluster.session import (
    Deliver,
    Effect,
    EndPrefill,
    Fail,
    Finish,
    Lost,
    PrefillOver,
    Session,
    StartDecode,
    State,
)
from deployments.cluster.timings import DEFAULT_TIMINGS, Timings
from deployments.errors import (
    HandoffFailed,
    Moved,
    NeverFits,
    Overloaded,
    ReplicaGone,
    ReplicaLost,
    SessionError,
    SessionTimeout,
    Unavailable,
    UnknownClass,
)
from deployments.host.waits import set_within, unless
from deployments.manager.port import Manager
from deployments.messages import (
    MANAGER_RETIRES,
    MOVED,
    Handoff,
    Mode,
    Placement,
    Reject,
    Role,
    SessionReport,
    SessionTask,
)
from deployments.output_stream import OutputReceiver
from deployments.policy.admission.retry_budget import RETRY_BUDGET
from deployments.policy.placement.split import continuation_rule

logger = logging.getLogger("baton.core")

_FINISH = {
    FinishReason.LENGTH: Finish.LENGTH,
    FinishReason.STOP: Finish.STOP,
    FinishReason.REPETITION: Finish.STOP,
    FinishReason.ABORT: Finish.ABORT,
    FinishReason.ERROR: Finish.ERROR,
}


class Pool(Protocol):
    """One pool of replicas. `run` reaches the replica that the task names; cancelling it ends that part."""

    async def run(self, task: SessionTask) -> SessionReport:
        """Raises ReplicaLost."""


@dataclass(eq=False, slots=True)
class _Attempt:
    """One placement of a session, and what runs for it. `answered`: the tokens that its client had before.

    `moved_from`: the replica that let the session go. `ended`: its owner has said that it holds nothing of it any more.
    `lost`: why it came to nothing. `until_pulled`: what ends when decode has the KV cache, where decode pulls it.
    `notices`: what the session manager is being told.
    """

    entry: _Open
    number: int
    request: EngineCoreRequest
    session: Session
    answered: tuple[int, ...] = ()
    moved_from: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    lost: SessionError | None = None
    outcome: str = ""
    placement: Placement | None = None
    output_tokens: int = 0
    ended: bool = False
    calls: list[asyncio.Task[None]] = field(default_factory=list)
    until_pulled: list[asyncio.Task[None]] = field(default_factory=list)
    notices: list[asyncio.Task[None]] = field(default_factory=list)
    prefill_stats: PrefillStats | None = None
    given_back: bool = False
    heard_s: float = field(default_factory=time.monotonic)

    @property
    def progressed(self) -> bool:
        """It gave the client more than a first token."""
        return self.output_tokens > 1


@dataclass(eq=False, slots=True)
class _Open:
    """One open session. `sent`: the tokens that its client has been given."""

    request: EngineCoreRequest
    context: RequestContext | None
    recovery: Recovery
    sent: list[int] = field(default_factory=list)
    attempts: list[_Attempt] = field(default_factory=list)

    @property
    def now(self) -> _Attempt:
        return self.attempts[-1]


class ClusterCore(EngineCoreClient):
    """Create it in a running event loop. `host`: the address replicas send outputs to.

    `block_size`: tokens per KV block, the same in all pools. `handoff`: how the engines of this application move a
    split session's KV cache.
    """

    engine_ranks_managed = (0,)

    def __init__(
        self,
        manager: Manager,
        pools: Mapping[str, Pool],
        host: str,
        session_timeout_s: float,
        block_size: int,
        limits: Limits,
        handoff: Handoff = Handoff.PUSHED,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._manager, self._pools, self._session_timeout_s = manager, pools, session_timeout_s
        self._block_size, self._handoff, self._limits, self._timings = block_size, handoff, limits, timings
        self._receiver = OutputReceiver(host)
        self._decoder, self._encoder = MsgpackDecoder(EngineCoreOutputs), MsgpackEncoder()
        self._open: dict[str, _Open] = {}
        self._attempts: dict[str, _Attempt] = {}  # by the id that engines know them by
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._batch: list[EngineCoreOutput] = []
        self._refusal: SessionError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._context = contextvars.copy_context()
        self._own(self._receive(), "outputs")
        self._own(self._watch(), "watch")

    # ---- the seam

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Begin a session and return at once; whatever becomes of it comes as outputs."""
        entry = _Open(request, request_context.current.get(), Recovery(self._limits, self._timings))
        self._open[request.request_id] = entry
        self._attempt(entry, request)
        self._own(self._serve(entry), f"session-{request.request_id}")

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if entry := self._open.get(request_id):
                self._apply(entry.now, entry.now.session.cancelled())

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    def shutdown(self, timeout: float | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        self._receiver.close()

    def end_all(self, error: SessionError) -> None:
        """Fail every open session: this process ends soon."""
        for entry in list(self._open.values()):
            self._apply(entry.now, entry.now.session.failed(error))

    def refuse(self, error: SessionError) -> None:
        """Place nothing any more: who waits for a place, or would from now on, gets the error. What runs goes on."""
        self._refusal = error
        for entry in list(self._open.values()):
            if entry.now.placement is None:
                self._apply(entry.now, entry.now.session.failed(error))

    @property
    def open_sessions(self) -> int:
        """Sessions that have begun and are not closed yet."""
        return len(self._open)

    # ---- one session

    def _attempt(self, entry: _Open, request: EngineCoreRequest, moved_from: str = "") -> None:
        """The next attempt takes over: from here on, it is the one that can be cancelled and can fail."""
        session = Session(entry.request.request_id, self._handoff)
        attempt = _Attempt(entry, len(entry.attempts) + 1, request, session, tuple(entry.sent), moved_from)
        entry.attempts.append(attempt)
        self._attempts[request.request_id] = attempt

    async def _serve(self, entry: _Open) -> None:
        try:
            async with asyncio.timeout(self._session_timeout_s):
                while await self._try(entry.now):
                    pass
        except TimeoutError:
            error = SessionTimeout(f"the session was not over within {self._session_timeout_s:g} s")
            self._apply(entry.now, entry.now.session.failed(error))
        except SessionError as error:
            self._apply(entry.now, entry.now.session.failed(error))
        except Exception as error:
            self._apply(entry.now, entry.now.session.failed(_internal(error)))
            raise
        finally:
            await asyncio.shield(self._own(self._close(entry), f"close-{entry.request.request_id}"))

    async def _try(self, attempt: _Attempt) -> bool:
        """See one attempt through. Whether it was lost, and the next is to be tried. Raises SessionError."""
        if (placement := await self._place(attempt)) is not None:
            self._begin(attempt, placement)
            await attempt.over.wait()
        if attempt.lost is None:
            return False
        entry, left = attempt.entry, remainder(attempt.entry.request, attempt.entry.sent, attempt.number + 1)
        if entry.context is not None and entry.sent and is_seeded(entry.request):
            entry.context.seed_moved = True
        assert placement is not None, "only a placement can be lost"
        rule = continuation_rule(traits(entry.request))
        owner = placement.owner.replica_id
        match entry.recovery.ended(attempt.lost, attempt.progressed, bool(entry.sent), rule, owner):
            case Again(moved_from, pause_s):
                if not moved_from:
                    logger.warning(
                        "session %s, placement %d: %s", entry.request.request_id, attempt.number, attempt.lost
                    )
                self._attempt(entry, left, moved_from)
                await self._end(attempt)
                if pause_s:
                    await set_within(entry.now.over, pause_s)
                return True
            case recovery.Fail(error):
                self._attempt(entry, left)
                raise error

    async def _end(self, attempt: _Attempt) -> None:
        """End what is still open of a lost attempt, and give back what was reserved for it."""
        await self._end_calls(attempt)
        await asyncio.gather(*attempt.notices, return_exceptions=True)  # nothing is placed on what is known as lost
        self._own(self._give_back(attempt), "give-back")

    async def _end_calls(self, attempt: _Attempt) -> None:
        for call in attempt.calls:
            call.cancel()
        await asyncio.gather(*attempt.calls, return_exceptions=True)
        self._attempts.pop(attempt.request.request_id, None)

    async def _place(self, attempt: _Attempt) -> Placement | None:
        """Ask the manager; None when the session was over before it answered. Raises SessionError."""
        if attempt.over.is_set():
            return None
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        entry = attempt.entry
        asked = session_request(
            attempt.request,
            entry.context,
            self._handoff,
            self._block_size,
            entry.request.request_id,
            attempt.number,
            attempt.answered,
        )
        progressed = attempt.number > 1 and entry.attempts[-2].progressed
        request = replace(asked, moved_from=attempt.moved_from, progressed=progressed)
        give_up_s = time.monotonic() + self._timings.budget_wait_s
        while isinstance(decision := await unless(attempt.over, self._manager.open(request)), Reject):
            if decision.code not in (RETRY_BUDGET, MANAGER_RETIRES) or time.monotonic() > give_up_s:
                raise _refusal(decision)
            await set_within(attempt.over, decision.retry_after_s or self._timings.pause_s)
        if decision is None:
            return None
        attempt.placement = decision.placement
        if entry.context is not None:
            entry.context.modes.add(decision.placement.mode)
            entry.context.rules.update({request.rule} - {""})
        return decision.placement if attempt.session.state is State.OPENING else None

    def _begin(self, attempt: _Attempt, placement: Placement) -> None:
        """Where decode pulls, prefill alone: its output starts decode.

        Otherwise decode first, so that its blocks are offered as early as can be; neither call waits for the other.
        """
        self._apply(attempt, attempt.session.placed(placement.mode))
        if placement.mode is Mode.DISAGGREGATED and self._handoff is Handoff.PULLED:
            attempt.until_pulled.append(self._start(attempt, placement, Role.PREFILL, {"do_remote_decode": True}))
            return
        for role, replica, peer in (
            (Role.DECODE, placement.decode, placement.prefill),
            (Role.PREFILL, placement.prefill, placement.decode),
        ):
            if replica is not None:
                self._start(attempt, placement, role, pushed(placement, role, peer) if peer else None)

    def _start(
        self, attempt: _Attempt, placement: Placement, role: Role, transfer: dict[str, Any] | None
    ) -> asyncio.Task[None]:
        """Call one replica. `transfer`: what its KV connector is told, none where nothing is handed over."""
        call = self._own(self._call(attempt, placement, role, transfer), f"{role}-call")
        attempt.calls.append(call)
        return call

    def _start_decode(self, attempt: _Attempt, prefilled: EngineCoreOutput) -> None:
        """Prefill holds the KV cache, and its output says where. Decode has `handoff_timeout_s` to begin."""
        placement = attempt.placement
        assert placement is not None
        attempt.prefill_stats = prefilled.prefill_stats
        self._start(attempt, placement, Role.DECODE, prefilled.kv_transfer_params)
        limit = self._own(self._limit_pull(attempt, placement.handoff_timeout_s), "pull-limit")
        attempt.calls.append(limit)
        attempt.until_pulled.append(limit)

    async def _limit_pull(self, attempt: _Attempt, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        error = HandoffFailed(f"decode has not begun within {timeout_s:g} s of the prefill")
        self._apply(attempt, attempt.session.lost(error))

    async def _call(self, attempt: _Attempt, placement: Placement, role: Role, transfer: dict[str, Any] | None) -> None:
        try:
            await self._run_part(attempt, placement, role, transfer)
        except Exception as error:
            self._apply(attempt, attempt.session.failed(_internal(error)))
            raise

    async def _run_part(
        self, attempt: _Attempt, placement: Placement, role: Role, transfer: dict[str, Any] | None
    ) -> None:
        replica = placement.decode if role is Role.DECODE else placement.prefill
        assert replica is not None
        request = part(attempt.request, role, self._handoff, transfer, attempt.answered)
        prompt_tokens = len(request.prompt_token_ids or ()) + len(attempt.answered)
        task = SessionTask(
            session_id=placement.session_id,
            epoch=placement.epoch,
            replica_id=replica.replica_id,
            request_id=request.request_id,
            request=tuple(bytes(frame) for frame in self._encoder.encode(request)),
            reply_to=self._receiver.address,
            timeout_s=placement.session_timeout_s,
            prompt_tokens=prompt_tokens,
            reservation=placement.reservation(replica.replica_id, prompt_tokens),
            movable=replica is placement.owner and not continuation_rule(traits(attempt.entry.request)),
            hands_over=role is Role.PREFILL and replica.replica_id == attempt.moved_from,
        )
        try:
            report = await self._pools[replica.pool].run(task)
        except ReplicaLost as error:
            lost = self._manager.lost(replica.replica_id, isinstance(error, ReplicaGone))
            attempt.notices.append(self._own(self._tell(lost), "lost"))
            self._apply(attempt, attempt.session.call_ended(role, clean=False, detail=str(error)))
            return
        attempt.ended |= replica is placement.owner
        if report.outcome == MOVED:
            self._apply(attempt, attempt.session.lost(Moved(f"{replica.replica_id} let it go"), MOVED))
            return
        clean = report.outcome == "finished"
        self._apply(attempt, attempt.session.call_ended(role, clean, report.outcome))
        if replica is placement.owner:
            await self._await_last_outputs(attempt)

    async def _await_last_outputs(self, attempt: _Attempt) -> None:
        """The call's answer and the last outputs travel apart."""
        await set_within(attempt.over, self._timings.output_grace_s)
        self._apply(attempt, attempt.session.lost(ReplicaLost("the last outputs did not arrive")))

    async def _watch(self) -> None:
        """A replica that neither we nor the manager hear of any more may be stopped or cut off without being dead."""
        counts = Counter[str]()
        while True:
            await asyncio.sleep(self._timings.watch_s)
            waiting = self._waiting_for()
            silent: tuple[str, ...] = ()
            if waiting:
                try:
                    silent = await asyncio.wait_for(
                        self._manager.silent(tuple(waiting)), self._timings.notice_timeout_s
                    )
                except (Unavailable, TimeoutError) as error:
                    logger.warning("the session manager cannot be asked: %r", error)
            counts = Counter({replica_id: counts[replica_id] + 1 for replica_id in silent})
            silent_times = self._timings.silent_times
            for replica_id in [replica_id for replica_id, times in counts.items() if times >= silent_times]:
                notice = self._own(self._tell(self._manager.lost(replica_id)), "lost")
                for attempt, role in waiting[replica_id]:
                    attempt.notices.append(notice)
                    self._apply(attempt, attempt.session.call_ended(role, clean=False, detail="it does not report"))

    def _waiting_for(self) -> dict[str, list[tuple[_Attempt, Role]]]:
        """The replicas of sessions that have had no output for long."""
        found = defaultdict[str, list[tuple[_Attempt, Role]]](list)
        quiet_since_s = time.monotonic() - self._timings.quiet_s
        for attempt in self._attempts.values():
            if attempt.placement is None or attempt.heard_s > quiet_since_s or attempt.over.is_set():
                continue
            for role, replica in ((Role.DECODE, attempt.placement.decode), (Role.PREFILL, attempt.placement.prefill)):
                if replica is not None:
                    found[replica.replica_id].append((attempt, role))
        return found

    async def _close(self, entry: _Open) -> None:
        """End what is still open of the session, then give back what was reserved for it."""
        if entry.now.ended and entry.now.calls:  # they end by themselves, which costs less than to cancel them
            await asyncio.wait(entry.now.calls, timeout=self._timings.call_grace_s)
        for attempt in entry.attempts:
            await self._end_calls(attempt)
        self._open.pop(entry.request.request_id, None)
        for attempt in entry.attempts:
            await self._give_back(attempt)
        if entry.now.placement is None:
            outcome = entry.now.outcome or "failed"
            await self._tell(self._manager.close(entry.request.request_id, 0, outcome))

    async def _give_back(self, attempt: _Attempt) -> None:
        if attempt.placement is not None and not attempt.given_back:
            attempt.given_back, placement, outcome = True, attempt.placement, attempt.outcome or "failed"
            key, tokens = (placement.session_id, placement.epoch), attempt.output_tokens
            await self._tell(self._manager.close(*key, outcome, tokens, attempt.ended))

    async def _tell(self, message: Coroutine[Any, Any, None]) -> None:
        try:
            await asyncio.wait_for(message, self._timings.notice_timeout_s)
        except (Unavailable, TimeoutError) as error:
            logger.warning("the session manager was not told: %r", error)

    # ---- outputs

    async def _receive(self) -> None:
        """One message is one engine step of one replica; it stays one batch for the frontend."""
        while True:
            replica_id, frames = await self._receiver.receive()
            try:
                outputs = self._decoder.decode(frames).outputs
            except Exception as error:  # noqa: BLE001 - it may be anything, and vLLM's hooks raise anything
                logger.warning("dropped a message that is no engine output: %r", error)
                continue
            for output in outputs:
                self._take(replica_id, output)
            self._flush()

    def _take(self, replica_id: str, output: EngineCoreOutput) -> None:
        attempt = self._attempts.get(output.request_id)
        if attempt is None or attempt.placement is None:
            return
        decode, prefill = attempt.placement.decode, attempt.placement.prefill
        if decode is not None and decode.replica_id == replica_id:
            role = Role.DECODE
        elif prefill is not None and prefill.replica_id == replica_id:
            role = Role.PREFILL
        else:
            return
        attempt.heard_s = time.monotonic()
        finish = None if output.finish_reason is None else _FINISH[output.finish_reason]
        if finish is not None and replica_id == attempt.placement.owner.replica_id:
            attempt.ended = True
        if attempt.entry.sent and attempt.number > 1:
            output.prefill_stats = None  # its prompt is no more the client's
        elif role is Role.DECODE and prefill is not None and output.prefill_stats is not None:
            output.prefill_stats = attempt.prefill_stats  # prefill's counts are the request's
        output.request_id = attempt.entry.request.request_id
        self._apply(attempt, attempt.session.output(role, output, finish), flush=False)

    def _apply(self, attempt: _Attempt, effects: list[Effect], flush: bool = True) -> None:
        for effect in effects:
            match effect:
                case Deliver(output, finish):
                    attempt.output_tokens += len(output.new_token_ids)
                    attempt.entry.sent += output.new_token_ids
                    self._batch.append(_delivered(output, finish))
                case PrefillOver():
                    self._prefill_over(attempt)
                case StartDecode(output):
                    self._start_decode(attempt, output)
                case EndPrefill():
                    for task in attempt.until_pulled:
                        task.cancel()
                case Lost(error):
                    attempt.lost = error
                case Fail(error):
                    self._fail(attempt.entry, error)
                case _:
                    attempt.outcome = effect.outcome
                    attempt.over.set()
        if flush:
            self._flush()

    def _prefill_over(self, attempt: _Attempt) -> None:
        assert attempt.placement is not None
        told = self._manager.prefill_done(attempt.placement.session_id, attempt.placement.epoch)
        self._own(self._tell(told), "prefill-done")

    def _fail(self, entry: _Open, error: SessionError) -> None:
        logger.warning("session %s failed: %s", entry.request.request_id, error)
        if entry.context is not None and entry.context.error is None:
            entry.context.error = error
        failed = EngineCoreOutput(entry.request.request_id, [], finish_reason=FinishReason.ERROR)
        self._batch.append(failed)

    def _flush(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self._outputs.put_nowait(EngineCoreOutputs(outputs=batch))

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task of ours, in our own context: what a client's request began must outlive it, to be closed.

        When a client goes away, Serve and Ray cancel whatever was called in its request's context, and a call that
        tells the session manager so would be lost.
        """
        task = asyncio.create_task(work, name=f"baton-{name}", context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s ended: %r", task.get_name(), error, exc_info=error)


def _delivered(output: EngineCoreOutput, finish: bool) -> EngineCoreOutput:
    output.kv_transfer_params = None
    if not finish:
        output.finish_reason = output.stop_reason = None
    return output


def _internal(error: Exception) -> SessionError:
    return SessionError(f"the session could not be carried out: {type(error).__name__}")


def _refusal(reject: Reject) -> SessionError:
    if reject.unavailable:
        return Unavailable(reject.reason)
    if reject.code == "unknown_class":
        return UnknownClass(reject.reason)
    if reject.retry_after_s is None:
        return NeverFits(reject.reason)
    return Overloaded(reject.reason, reject.retry_after_s, reject.code)
