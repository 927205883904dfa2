"""The span of one HTTP request. It begins when the request has come, and every other span of its trace is below it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.errors import Answer
from deployments.cluster.request_context import RequestContext
from deployments.tracing import attributes as names

if TYPE_CHECKING:
    from deployments.tracing.tracer import Span, Tracer, Value

_HEADERS = (b"traceparent", b"tracestate")
_LONGEST = 500
"""Characters of a path."""


class RequestSpan:
    """`span`: what sessions are below. `started_s`: when the request came, by the monotonic clock."""

    __slots__ = ("_started_s", "span")

    def __init__(self, tracer: Tracer, scope: Mapping[str, Any], request_id: str, started_s: float) -> None:
        method, path = str(scope["method"]), str(scope["path"])[:_LONGEST]
        told = {names.METHOD: method, names.PATH: path, names.REQUEST_ID: request_id}
        self._started_s = started_s
        self.span: Span = tracer.begin(f"{method} {path}", trace_headers(scope), told, started_s)

    def end(
        self, status: int, outcome: str, failure: Answer | None, context: RequestContext | None, key: str | None
    ) -> None:
        """`status`: 0 where the client got none. `outcome`: as in the access log. `key`: the name of its API key."""
        now_s = time.monotonic()
        told: dict[str, Value] = {names.OUTCOME: outcome, names.E2E_S: now_s - self._started_s}
        if status:
            told[names.STATUS] = status
        if key is not None:
            told[names.KEY] = key
        if context is not None:
            told |= self._of_sessions(context)
        self.span.end(now_s, told, "" if failure is None else str(failure.body["error"]["code"] or status))

    def _of_sessions(self, context: RequestContext) -> dict[str, Value]:
        told: dict[str, Value] = {
            names.SEQUENCES: context.sessions,
            names.PROMPT_TOKENS: context.prompt_tokens,
            names.OUTPUT_TOKENS: context.output_tokens,
        }
        texts = ((names.CLASS, [context.priority]), (names.MODE, context.modes), (names.RULE, context.rules))
        told |= {name: text for name, values in texts if (text := ",".join(sorted(values)))}
        if context.first_token_s is not None:
            told[names.TTFT_S] = context.first_token_s - self._started_s
        return told


def trace_headers(scope: Mapping[str, Any]) -> dict[str, str]:
    """What a request says of the trace that it belongs to, by the rules of W3C: several `traceparent` are none."""
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        if name.lower() in _HEADERS:
            found.setdefault(name.lower().decode(), []).append(value.decode("latin-1"))
    if len(found.get("traceparent", ())) != 1:
        return {}
    return {name: ",".join(values) for name, values in found.items()}
