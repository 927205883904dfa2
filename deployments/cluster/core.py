"""The engine-core client that spans the cluster: what vLLM's frontend takes for its one engine core.

Three calls are the seam: add a request, abort it, get outputs. Below it a request becomes a session: the session
manager places it, a prefill and a decode replica share it, and their two streams of outputs are merged into one.
This file imports vllm.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic
from types import SimpleNamespace

from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.serial_utils import MsgpackDecoder

from deployments.cluster import request_context
from deployments.cluster.answer import Answer
from deployments.cluster.attempt import Means
from deployments.cluster.batch import Batch
from deployments.cluster.engine_request import keep_apart, name_adapter
from deployments.cluster.meter import Meter, SessionMeter
from deployments.cluster.notices import Notices
from deployments.cluster.open_session import OpenSession
from deployments.cluster.port import Replicas
from deployments.cluster.recovery import Limits, Recovery
from deployments.cluster.request_context import RequestContext
from deployments.cluster.silence import SilenceWatch
from deployments.cluster.spans import SessionSpans
from deployments.cluster.timeline import Timeline, Timelines
from deployments.cluster.timings import DEFAULT_TIMINGS, Timings
from deployments.errors import RequestFault, SessionError, TooManyParts
from deployments.host.tasks import OwnTasks
from deployments.manager.calls import Manager
from deployments.messages import Handoff
from deployments.tracing import attributes as names
from transfer.control.messages import NAME_CHARS

logger = logging.getLogger("baton.core")


class ClusterCore(EngineCoreClient):
    """Create it in a running event loop. `replicas`: what sessions run on; it closes with the core.

    `session_timeout_s`: the longest life of one session. `block_size`: tokens per KV block, the same in all pools.
    `limits`: how often one session may be placed. `handoff`: how the engines of this application move a split session's
    KV cache. `meter`: measures sessions; None: nothing does. `timelines`: keeps when each did what; None: nothing does.
    """

    engine_ranks_managed = (0,)

    def __init__(
        self,
        manager: Manager,
        replicas: Replicas,
        session_timeout_s: float,
        block_size: int,
        limits: Limits,
        handoff: Handoff = Handoff.PUSHED,
        timings: Timings = DEFAULT_TIMINGS,
        meter: Meter | None = None,
        timelines: Timelines | None = None,
    ) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._session_timeout_s, self._limits, self._timings = session_timeout_s, limits, timings
        self._replicas, self._decoder = replicas, MsgpackDecoder(EngineCoreOutputs)
        self._tasks, self._batch = OwnTasks(), Batch()
        self._refusal: SessionError | None = None
        self._meter, self._timelines, self._pulls = meter, timelines, handoff is Handoff.PULLED
        self._open: dict[str, OpenSession] = {}
        notices = Notices(manager, self._tasks, timings)
        self._means = Means(manager, notices, replicas, self._tasks, self._batch, handoff, block_size, timings)
        replicas.listen(self._take)
        self._tasks.own(SilenceWatch(self._means.running, notices, timings).run(), "watch")

    # ---- the seam

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Begin a session and return at once. The answer or the error comes as outputs."""
        context = request_context.current.get()
        name_adapter(request)
        keep_apart(request, context)
        answer = Answer(request, context, self._batch)
        if context is None or context.is_served:
            answer.meter, answer.timeline = self._session_meter(request, context), self._timeline(answer)
            answer.spans = _spans(request, context, self._means.handoff)
        recovery = Recovery(self._limits, self._timings)
        session = self._open[request.request_id] = OpenSession(answer, self._means, recovery, self._session_timeout_s)
        if refusal := self._refusal or _too_long(request.request_id) or _enter(session, answer, context):
            session.refuse(refusal)
        self._tasks.own(self._serve(answer, session), f"session-{request.request_id}")

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if session := self._open.get(request_id):
                session.now.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._batch.next()

    def shutdown(self, timeout: float | None = None) -> None:
        self._tasks.cancel()
        self._replicas.close()

    def end_all(self, error: SessionError) -> None:
        """Fail every open session: this process ends soon."""
        for session in list(self._open.values()):
            session.fail(error)

    def refuse(self, error: SessionError) -> None:
        """Place nothing any more: a session that waits for a place, or would wait later, fails with the error.

        A session that runs goes on.
        """
        self._refusal = error
        for session in list(self._open.values()):
            session.refuse(error)

    @property
    def open_sessions(self) -> int:
        """Sessions that have begun and are not closed yet."""
        return len(self._open)

    # ---- sessions

    def _session_meter(self, request: EngineCoreRequest, context: RequestContext | None) -> SessionMeter | None:
        if self._meter is None:
            return None
        prompt_tokens = len(request.prompt_token_ids or ())
        return SessionMeter(self._meter, prompt_tokens, None if context is None else context.arrived_s)

    def _timeline(self, answer: Answer) -> Timeline | None:
        if self._timelines is None:
            return None
        name, context = answer.session_id, answer.context
        request_id, arrived_s = (name, monotonic()) if context is None else (context.request_id, context.arrived_s)
        prompt_tokens = len(answer.request.prompt_token_ids or ())
        return self._timelines.begin(Timeline(request_id, name, prompt_tokens, arrived_s, answer.sent, self._pulls))

    async def _serve(self, answer: Answer, session: OpenSession) -> None:
        request_id = answer.session_id
        try:
            await session.serve()
        finally:
            self._open.pop(request_id, None)
            if answer.context is not None:
                answer.context.parts.pop(request_id, None)
            if self._timelines is not None and answer.timeline is not None:
                self._timelines.end(answer.timeline)
            session.end()

    # ---- outputs

    def _take(self, replica_id: str, frames: Sequence[bytes]) -> None:
        """Take one engine step of one replica; it stays one batch for the frontend."""
        try:
            came = self._decoder.decode(frames)
        except Exception as error:  # noqa: BLE001 - it may be anything, and vLLM's hooks raise anything
            logger.warning("dropped a message that is no engine output: %r", error)
            return
        for output in came.outputs:
            if attempt := self._means.running.get(output.request_id):
                attempt.take(replica_id, output, came.timestamp)
        self._batch.flush()


def _spans(request: EngineCoreRequest, context: RequestContext | None, handoff: Handoff) -> SessionSpans | None:
    """What makes the spans of a session; None where its request is not traced."""
    if context is None or context.span is None or not context.span.is_recording:
        return None
    params = request.sampling_params
    assert params is not None
    told = {
        names.REQUEST_ID: context.request_id,
        names.SESSION: request.request_id,
        names.PROMPT_TOKENS: len(request.prompt_token_ids or ()),
        names.MAX_TOKENS: params.max_tokens or 0,
        names.TEMPERATURE: params.temperature,
        names.TOP_P: params.top_p,
    }
    return SessionSpans(context.span, handoff, told)


def _too_long(request_id: str) -> SessionError | None:
    """Workers drop messages about a session with such a name, and its blocks would never be released."""
    if len(request_id) <= NAME_CHARS:
        return None
    return RequestFault(f"the request's id becomes {len(request_id)} characters long, and {NAME_CHARS} are allowed")


def _enter(session: OpenSession, answer: Answer, context: RequestContext | None) -> SessionError | None:
    """Count a session as its request's, or say why it is refused."""
    if context is None:
        return None
    if context.error is not None:
        return context.error
    context.parts[answer.session_id] = session
    if context.most_parts and len(context.parts) > context.most_parts:
        return TooManyParts(f"the request would become more than {context.most_parts} answers")
    return None
