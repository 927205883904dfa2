"""The session manager's span in a trace: from a session's question until its placement or refusal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from deployments.manager.calls import Open
from deployments.messages import Admit, Reject
from deployments.tracing import attributes as names

if TYPE_CHECKING:
    from deployments.tracing.tracer import Tracer, Value


async def traced(tracer: Tracer, call: Open, answer: Awaitable[Admit | Reject]) -> Admit | Reject:
    """The answer to the call, and the span of its admission. `answer`: the session manager's."""
    asked = call.request
    told: dict[str, Value] = {names.SESSION: asked.session_id, names.ATTEMPT: asked.attempt}
    span = tracer.begin("admission", {"traceparent": asked.traceparent}, told)
    try:
        decision = await answer
    except asyncio.CancelledError:  # the ingress asks no more
        span.end(time.monotonic(), {names.OUTCOME: "cancelled"})
        raise
    except Exception as error:
        span.end(time.monotonic(), error=type(error).__name__)
        raise
    if isinstance(decision, Admit):
        placement = decision.placement
        replicas = {names.REPLICA: placement.owner.replica_id, names.FROM_REPLICA: placement.prefiller.replica_id}
        reason = {names.MODE: str(placement.mode), names.REASON: placement.reason}
        span.end(time.monotonic(), {names.OUTCOME: "placed", **reason, **replicas})
    else:
        span.end(time.monotonic(), {names.OUTCOME: "refused"}, decision.code or "refused")
    return decision
