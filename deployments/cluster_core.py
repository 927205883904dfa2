"""The engine-core client that spans the cluster: what vLLM's frontend takes for its one engine core.

Three calls are the seam: add a request, abort it, get outputs. Below it a request becomes a session: placed by the
session manager, split between a prefill and a decode replica, its two streams of outputs merged into one.
One of the four files that import vllm.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments import request_context
from deployments.errors import (
    HandoffFailed,
    NeverFits,
    Overloaded,
    ReplicaLost,
    SessionError,
    SessionTimeout,
    Unavailable,
    UnknownClass,
)
from deployments.messages import (
    Admit,
    Handoff,
    Mode,
    Placement,
    Reject,
    ReplicaInfo,
    Role,
    SessionReport,
    SessionRequest,
    SessionTask,
)
from deployments.policy.split import RequestTraits, split_rule
from deployments.request_context import RequestContext
from deployments.session import (
    Deliver,
    Effect,
    EndPrefill,
    Fail,
    Finish,
    PrefillOver,
    Session,
    StartDecode,
    State,
)
from deployments.wire import OutputReceiver
from transfer.blocks import chained_hashes

logger = logging.getLogger("baton.core")

OUTPUT_GRACE_S = 5.0
CLOSE_TIMEOUT_S = 10.0

_FINISH = {
    FinishReason.LENGTH: Finish.LENGTH,
    FinishReason.STOP: Finish.STOP,
    FinishReason.REPETITION: Finish.STOP,
    FinishReason.ABORT: Finish.ABORT,
    FinishReason.ERROR: Finish.ERROR,
}


class Manager(Protocol):
    """The session manager. Every call may raise Unavailable."""

    async def open(self, request: SessionRequest) -> Admit | Reject: ...

    async def prefill_done(self, session_id: str, epoch: int) -> None: ...

    async def close(self, session_id: str, epoch: int, outcome: str, output_tokens: int | None = None) -> None: ...

    async def lost(self, replica_id: str) -> None: ...


class Pool(Protocol):
    """One pool of replicas. `run` reaches the replica that the task names; cancelling it ends that part."""

    async def run(self, task: SessionTask) -> SessionReport:
        """Raises ReplicaLost."""


@dataclass(eq=False, slots=True)
class _Open:
    """One open session. `until_pulled`: what ends when decode has the KV cache, where decode pulls it."""

    request: EngineCoreRequest
    context: RequestContext | None
    session: Session
    over: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: str = ""
    output_tokens: int = 0
    placement: Placement | None = None
    calls: list[asyncio.Task[None]] = field(default_factory=list)
    until_pulled: list[asyncio.Task[None]] = field(default_factory=list)
    prefill_stats: PrefillStats | None = None


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
        handoff: Handoff = Handoff.PUSHED,
    ) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._manager, self._pools, self._session_timeout_s = manager, pools, session_timeout_s
        self._block_size, self._handoff = block_size, handoff
        self._receiver = OutputReceiver(host)
        self._decoder, self._encoder = MsgpackDecoder(EngineCoreOutputs), MsgpackEncoder()
        self._open: dict[str, _Open] = {}
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._batch: list[EngineCoreOutput] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._context = contextvars.copy_context()
        self._own(self._receive(), "outputs")

    # ---- the seam

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Begin a session and return at once; whatever becomes of it comes as outputs."""
        context = request_context.current.get()
        entry = _Open(request, context, Session(request.request_id, self._handoff))
        self._open[request.request_id] = entry
        self._own(self._serve(entry), f"session-{request.request_id}")

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if entry := self._open.get(request_id):
                self._apply(entry, entry.session.cancelled())

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    def shutdown(self, timeout: float | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        self._receiver.close()

    @property
    def open_sessions(self) -> int:
        """Sessions that have begun and are not closed yet."""
        return len(self._open)

    # ---- one session

    async def _serve(self, entry: _Open) -> None:
        session = entry.session
        try:
            async with asyncio.timeout(self._session_timeout_s):
                if (placement := await self._place(entry)) is not None:
                    self._begin(entry, placement)
                    await entry.over.wait()
        except TimeoutError:
            error = SessionTimeout(f"the session was not over within {self._session_timeout_s:g} s")
            self._apply(entry, session.failed(error))
        except SessionError as error:
            self._apply(entry, session.failed(error))
        except Exception as error:
            self._apply(entry, session.failed(_internal(error)))
            raise
        finally:
            await asyncio.shield(self._own(self._close(entry), f"close-{session.session_id}"))

    async def _place(self, entry: _Open) -> Placement | None:
        """Ask the manager; None when the session was over before it answered. Raises SessionError."""
        request = _session_request(entry.request, entry.context, self._handoff, self._block_size)
        opening = asyncio.ensure_future(self._manager.open(request))
        over = asyncio.ensure_future(entry.over.wait())
        try:
            await asyncio.wait({opening, over}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return None
            decision = opening.result()
        finally:
            for waiting in (opening, over):
                waiting.cancel()
        if isinstance(decision, Reject):
            raise _refusal(decision)
        entry.placement = decision.placement
        if entry.context is not None:
            entry.context.modes.add(decision.placement.mode)
            entry.context.rules.update({request.rule} - {""})
        return decision.placement if entry.session.state is State.OPENING else None

    def _begin(self, entry: _Open, placement: Placement) -> None:
        """Where decode pulls, prefill alone: its output starts decode.

        Otherwise decode first, so that its blocks are offered as early as can be; neither call waits for the other.
        """
        self._apply(entry, entry.session.placed(placement.mode))
        if placement.mode is Mode.DISAGGREGATED and self._handoff is Handoff.PULLED:
            entry.until_pulled.append(self._start(entry, placement, Role.PREFILL, {"do_remote_decode": True}))
            return
        for role, replica, peer in (
            (Role.DECODE, placement.decode, placement.prefill),
            (Role.PREFILL, placement.prefill, placement.decode),
        ):
            if replica is not None:
                self._start(entry, placement, role, _pushed(placement, role, peer) if peer else None)

    def _start(
        self, entry: _Open, placement: Placement, role: Role, transfer: dict[str, Any] | None
    ) -> asyncio.Task[None]:
        """Call one replica. `transfer`: what its KV connector is told, none where nothing is handed over."""
        call = self._own(self._call(entry, placement, role, transfer), f"{role}-call")
        entry.calls.append(call)
        return call

    def _start_decode(self, entry: _Open, prefilled: EngineCoreOutput) -> None:
        """Prefill holds the KV cache, and its output says where. Decode has `handoff_timeout_s` to begin."""
        placement = entry.placement
        assert placement is not None
        entry.prefill_stats = prefilled.prefill_stats
        self._start(entry, placement, Role.DECODE, prefilled.kv_transfer_params)
        limit = self._own(self._limit_pull(entry, placement.handoff_timeout_s), "pull-limit")
        entry.calls.append(limit)
        entry.until_pulled.append(limit)

    async def _limit_pull(self, entry: _Open, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        error = HandoffFailed(f"decode has not begun within {timeout_s:g} s of the prefill")
        self._apply(entry, entry.session.failed(error))

    async def _call(self, entry: _Open, placement: Placement, role: Role, transfer: dict[str, Any] | None) -> None:
        try:
            await self._run_part(entry, placement, role, transfer)
        except Exception as error:
            self._apply(entry, entry.session.failed(_internal(error)))
            raise

    async def _run_part(self, entry: _Open, placement: Placement, role: Role, transfer: dict[str, Any] | None) -> None:
        replica = placement.decode if role is Role.DECODE else placement.prefill
        assert replica is not None
        request = _part(entry.request, role, self._handoff, transfer)
        prompt_tokens = len(request.prompt_token_ids or ())
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
        )
        try:
            report = await self._pools[replica.pool].run(task)
        except ReplicaLost as error:
            self._own(self._tell(self._manager.lost(replica.replica_id)), "lost")
            self._apply(entry, entry.session.call_ended(role, clean=False, detail=str(error)))
            return
        clean = report.outcome == "finished"
        self._apply(entry, entry.session.call_ended(role, clean, report.outcome))
        if replica is placement.owner:
            await self._await_last_outputs(entry)

    async def _await_last_outputs(self, entry: _Open) -> None:
        """The call's answer and the last outputs travel apart."""
        try:
            await asyncio.wait_for(entry.over.wait(), OUTPUT_GRACE_S)
        except TimeoutError:
            self._apply(entry, entry.session.failed(ReplicaLost("the last outputs did not arrive")))

    async def _close(self, entry: _Open) -> None:
        """End what is still open of the session, then give back what was reserved for it."""
        for call in entry.calls:
            call.cancel()
        await asyncio.gather(*entry.calls, return_exceptions=True)
        self._open.pop(entry.request.request_id, None)
        epoch = entry.placement.epoch if entry.placement else 0
        outcome = entry.outcome or "failed"
        await self._tell(self._manager.close(entry.session.session_id, epoch, outcome, entry.output_tokens))

    async def _tell(self, message: Coroutine[Any, Any, None]) -> None:
        try:
            await asyncio.wait_for(message, CLOSE_TIMEOUT_S)
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
        entry = self._open.get(output.request_id)
        if entry is None or entry.placement is None:
            return
        decode, prefill = entry.placement.decode, entry.placement.prefill
        if decode is not None and decode.replica_id == replica_id:
            role = Role.DECODE
        elif prefill is not None and prefill.replica_id == replica_id:
            role = Role.PREFILL
        else:
            return
        finish = None if output.finish_reason is None else _FINISH[output.finish_reason]
        if role is Role.DECODE and prefill is not None and output.prefill_stats is not None:
            output.prefill_stats = entry.prefill_stats  # prefill's counts are the request's
        self._apply(entry, entry.session.output(role, output, finish), flush=False)

    def _apply(self, entry: _Open, effects: list[Effect], flush: bool = True) -> None:
        for effect in effects:
            match effect:
                case Deliver(output, finish):
                    entry.output_tokens += len(output.new_token_ids)
                    self._batch.append(_delivered(output, finish))
                case PrefillOver():
                    self._prefill_over(entry)
                case StartDecode(output):
                    self._start_decode(entry, output)
                case EndPrefill():
                    for task in entry.until_pulled:
                        task.cancel()
                case Fail(error):
                    self._fail(entry, error)
                case _:
                    entry.outcome = effect.outcome
                    entry.over.set()
        if flush:
            self._flush()

    def _prefill_over(self, entry: _Open) -> None:
        assert entry.placement is not None
        told = self._manager.prefill_done(entry.session.session_id, entry.placement.epoch)
        self._own(self._tell(told), "prefill-done")

    def _fail(self, entry: _Open, error: SessionError) -> None:
        logger.warning("session %s failed: %s", entry.session.session_id, error)
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


def _session_request(
    request: EngineCoreRequest, context: RequestContext | None, handoff: Handoff, block_size: int
) -> SessionRequest:
    params = request.sampling_params
    assert params is not None
    assert params.max_tokens is not None
    allowed, rule = split_rule(traits(request), handoff)
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return SessionRequest(
        request.request_id,
        len(request.prompt_token_ids or ()),
        params.max_tokens,
        allowed,
        rule,
        hashes=_hashes(request, block_size, adapter),
        priority=context.priority if context else "",
        client=context.client if context else "",
        affinity=context.affinity if context else "",
        adapter=adapter,
        chat=context.chat if context else False,
    )


def _hashes(request: EngineCoreRequest, block_size: int, adapter: str) -> tuple[int, ...]:
    """The prompt's blocks as replicas name theirs; none where KV depends on more than tokens and the adapter."""
    tokens = request.prompt_token_ids or []
    if len(tokens) < block_size or request.cache_salt or request.mm_features or request.prompt_embeds is not None:
        return ()
    return chained_hashes(tokens, block_size, salt=adapter)


def traits(request: EngineCoreRequest) -> RequestTraits:
    """What of a vLLM request bears on splitting it."""
    params = request.sampling_params
    assert params is not None
    assert params.max_tokens is not None
    return RequestTraits(
        max_tokens=params.max_tokens,
        prompt_logprobs=params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None,
        seeded_sampling=params.seed is not None and params.temperature > 0,
        output_penalties=params.presence_penalty != 0 or params.frequency_penalty != 0,
        structured_output=params.structured_outputs is not None,
        bad_words=bool(params.bad_words),
        stateful_logits=params.thinking_token_budget is not None or bool(params.watermarking),
        has_embeds_or_multimodal=bool(request.mm_features) or request.prompt_embeds is not None,
        lora=request.lora_request is not None,
        repetition_detection=params.repetition_detection is not None,
    )


def _pushed(placement: Placement, role: Role, peer: ReplicaInfo) -> dict[str, Any]:
    """What Baton's connector is told: which handoff, and where the other side's workers are."""
    return {
        "baton": {
            "role": str(role),
            "session": placement.session_id,
            "epoch": placement.epoch,
            "peers": list(peer.endpoints),
        }
    }


def _part(
    request: EngineCoreRequest, role: Role, handoff: Handoff, transfer: dict[str, Any] | None
) -> EngineCoreRequest:
    """The request as one replica gets it. What a client may have said of KV transfers does not reach an engine."""
    assert request.sampling_params is not None
    part, params = copy.copy(request), copy.copy(request.sampling_params)
    if transfer is not None:
        params = _split(params, role, handoff)
    # A client's `kv_cache_report_mode` would have the engine tell of blocks as cached that it has told of before.
    told = {**(params.extra_args or {}), "kv_transfer_params": transfer, "kv_cache_report_mode": None}
    params.extra_args = {name: value for name, value in told.items() if value is not None} or None
    part.sampling_params = params
    return part


def _split(params: SamplingParams, role: Role, handoff: Handoff) -> SamplingParams:
    """One role's share of the sampling; `params` is changed."""
    assert params.max_tokens is not None
    match handoff, role:
        case Handoff.PULLED, Role.PREFILL:
            return SamplingParams(temperature=0.0, max_tokens=1)  # nobody sees its token: no grammar, no stops
        case Handoff.PUSHED, Role.PREFILL:
            params.max_tokens, params.min_tokens = 1, min(1, params.min_tokens)
        case Handoff.PUSHED, Role.DECODE:
            params.max_tokens, params.min_tokens = params.max_tokens - 1, max(0, params.min_tokens - 1)
    return params
