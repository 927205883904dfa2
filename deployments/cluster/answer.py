"""A client's request, and as much of its answer as the client has.

This file imports vllm.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from deployments.cluster.batch import Batch
from deployments.cluster.engine_request import Remainder, digest, is_seeded, remainder, session_request, traits
from deployments.cluster.meter import SessionMeter
from deployments.cluster.request_context import RequestContext
from deployments.cluster.spans import SessionSpans
from deployments.cluster.timeline import Timeline
from deployments.errors import SessionError
from deployments.logs import of_session
from deployments.messages import Allowance, Handoff, Placement, Role, SessionRequest
from deployments.policy.placement.split import continuation_rule

logger = logging.getLogger("baton.core")


@dataclass(eq=False, slots=True)
class Answer:
    """`context`: the HTTP request behind it, if there is one. `sent`: the tokens that the client has been given.

    `meter`, `timeline`, `spans`: measure it, note when it did what, and make its spans; None where nothing does.
    `error`: the one that has ended it.
    """

    request: EngineCoreRequest
    context: RequestContext | None
    batch: Batch
    sent: list[int] = field(default_factory=list)
    meter: SessionMeter | None = None
    timeline: Timeline | None = None
    spans: SessionSpans | None = None
    error: SessionError | None = None
    _digest: int = 0

    def __post_init__(self) -> None:
        if self.context is not None:
            self.context.note_session(self.request.prompt_token_ids or (), self.sent)

    @property
    def session_id(self) -> str:
        session_id: str = self.request.request_id
        return session_id

    @property
    def digest(self) -> int:
        """Of the request, without its id."""
        self._digest = self._digest or digest(self.request)
        return self._digest

    @property
    def continuation_rule(self) -> str:
        """Why an answer that has begun cannot continue on another replica; "" when it can."""
        return continuation_rule(traits(self.request))

    @property
    def _has_stop_strings(self) -> bool:
        params = self.request.sampling_params
        return params is not None and bool(params.stop)

    def remainder(
        self, number: int, moved_from: str, after_progress: bool, failed_handoffs: tuple[str, ...] = ()
    ) -> Remainder:
        """What attempt `number`, from 2, has to do."""
        if self.context is not None and self.sent and is_seeded(self.request):
            self.context.seed_moved = True
        left = remainder(self.request, self.sent, number)
        return Remainder(number, left, tuple(self.sent), moved_from, after_progress, failed_handoffs)

    def asks(self, left: Remainder, handoff: Handoff, block_size: int) -> SessionRequest:
        """What an attempt asks the session manager."""
        traceparent = "" if self.spans is None else self.spans.asks()
        return session_request(left, self.context, handoff, block_size, self.session_id, self.digest, traceparent)

    # ---- what is noted of it

    @property
    def traceparent(self) -> str:
        """For replicas: the parent of their spans."""
        return "" if self.spans is None else self.spans.traceparent

    def placed(self, placement: Placement, rule: str) -> None:
        """It has a place, the first one or another. `rule`: the rule that keeps it whole; "" for none."""
        if self.context is not None:
            self.context.modes.add(placement.mode)
            self.context.rules.update({rule} - {""})
        if self.meter is not None:
            self.meter.placed(placement, rule)
        if self.timeline is not None:
            self.timeline.placed(placement)
        if self.spans is not None:
            self.spans.placed(placement, rule)

    def left(self, allowance: Allowance | None) -> None:
        """The session manager has decided, and says what the request's key has left."""
        if self.context is not None and allowance is not None:
            self.context.allowance = allowance

    def took(self, role: Role, output: EngineCoreOutput, stamp_s: float) -> None:
        """An output came that is not merely the next one. `stamp_s`: when, by the clock of its engine."""
        if self.meter is not None:
            self.meter.took(role, output.events, stamp_s)
        if self.timeline is not None and output.new_token_ids:
            self.timeline.took(role, output.events, stamp_s)
        if self.spans is not None:
            self.spans.took(role, len(output.new_token_ids), output.events, stamp_s)

    def again(self, cause: str, error: SessionError, tokens: int) -> None:
        """It is placed again. `cause`: `move` or `loss`. `tokens`: the lost placement gave so many."""
        if self.meter is not None:
            self.meter.again(cause, error)
        if self.timeline is not None:
            self.timeline.again(cause, error)
        if self.spans is not None:
            self.spans.again(cause, error, tokens)

    def ended(self, mode: str, outcome: str, heard_s: float, tokens: int) -> None:
        """It is over. An answer that vLLM's frontend cancelled for a stop string has ended well.

        `heard_s`: when the last output came. `tokens`: of its last placement.
        """
        has_left = self.context is not None and self.context.left
        if outcome == "cancelled" and self._has_stop_strings and not has_left:
            outcome = "stop"
        if logger.isEnabledFor(logging.INFO):
            about = of_session(self.session_id)
            logger.info("session %s: %s after %d tokens", self.session_id, outcome, len(self.sent), extra=about)
        if self.meter is not None:
            self.meter.ended(mode, outcome)
        if self.timeline is not None:
            error = self.context.error if self.context is not None and outcome == "failed" else None
            self.timeline.ended(outcome, "" if error is None else str(error))
        if self.spans is not None:
            self.spans.ended(outcome, self.error, heard_s, tokens, len(self.sent))

    # ---- what the client gets

    def give(self, output: EngineCoreOutput, finish: bool) -> None:
        """Add an output to the batch. `finish`: whether its finish reason stands."""
        output.request_id = self.session_id
        output.kv_transfer_params = None
        if not finish:
            output.finish_reason = output.stop_reason = None
        if not self.sent and self.context is not None and self.context.first_token_s is None:
            self.context.first_token_s = time.monotonic() if output.new_token_ids else None
        if self.meter is not None:
            self.meter.gave(len(output.new_token_ids), output.prefill_stats)
        self.sent += output.new_token_ids
        self.batch.add(output)

    def explained(self, explanation: dict[str, Any]) -> None:
        """End the answer without a token: its request asks for an explanation."""
        assert self.context is not None
        self.context.explanation = self.context.explanation or explanation
        self.batch.add(EngineCoreOutput(self.session_id, [], finish_reason=FinishReason.STOP))

    def fail(self, error: SessionError) -> None:
        """End the answer with an error, and with it the request's other answers."""
        self.error = self.error or error
        if self.context is None or self.context.fail(error):
            logger.warning("session %s failed: %s", self.session_id, error, extra=of_session(self.session_id))
        self.batch.add(EngineCoreOutput(self.session_id, [], finish_reason=FinishReason.ERROR))
