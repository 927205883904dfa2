"""A replica's span in a trace: from the beginning of a session's part there until its end."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from deployments.link.replica_side import Ingress, Runs
from deployments.messages import SessionTask
from deployments.tracing import attributes as names

if TYPE_CHECKING:
    from deployments.tracing.tracer import Tracer, Value


class TracedRuns:
    """Runs parts as `runs` does. `tracer`: None until there is one; then nothing is traced."""

    def __init__(self, runs: Runs, pool: str) -> None:
        self._runs, self._pool = runs, pool
        self.tracer: Tracer | None = None

    async def run(self, task: SessionTask, ingress: Ingress, number: int) -> str:
        """See `Replica.run`."""
        if self.tracer is None or not task.traceparent:
            return await self._runs.run(task, ingress, number)
        told: dict[str, Value] = {
            names.SESSION: task.session_id,
            names.POOL: self._pool,
            names.REPLICA: task.replica_id,
            names.PROMPT_TOKENS: task.prompt_tokens,
        }
        span = self.tracer.begin("part", {"traceparent": task.traceparent}, told)
        try:
            outcome = await self._runs.run(task, ingress, number)
        except asyncio.CancelledError:  # the ingress has all that it wants of it
            span.end(time.monotonic(), {names.OUTCOME: "cancelled"})
            raise
        except Exception as error:
            span.end(time.monotonic(), error=type(error).__name__)
            raise
        span.end(time.monotonic(), {names.OUTCOME: outcome})
        return outcome

    def orphan(self, ingress: Ingress) -> None:
        """See `Replica.orphan`."""
        self._runs.orphan(ingress)
