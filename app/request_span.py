"""The span of one HTTP request. It begins when the request has come, and every other span of its trace is below it.

With it the request is measured for OpenTelemetry's `gen_ai.server.*`, whether or not its trace is left out.
"""

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
_CHAT = ("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages")
_OPERATIONS = {**dict.fromkeys(_CHAT, "chat"), "/v1/completions": "text_completion"}
"""OpenTelemetry's names of what routes do. Requests of other routes are not measured."""


class RequestSpan:
    """`span`: what sessions are below. `started_s`: when the request came, by the monotonic clock."""

    __slots__ = ("_measures", "_operation", "_started_s", "span")

    def __init__(self, tracer: Tracer, scope: Mapping[str, Any], request_id: str, started_s: float) -> None:
        method, path = str(scope["method"]), str(scope["path"])[:_LONGEST]
        told = {names.METHOD: method, names.PATH: path, names.REQUEST_ID: request_id}
        self._started_s, self._measures = started_s, tracer.measures
        route = path.removeprefix(scope.get("root_path", "")).rstrip("/")
        self._operation = _OPERATIONS.get(route, "") if method == "POST" else ""
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
        error = "" if failure is None else str(failure.body["error"]["code"] or status)
        self.span.end(now_s, told, error)
        if self._measures is not None and self._operation:
            error = error or ("" if outcome == "ok" else outcome)
            self._measures.ended(self._operation, now_s - self._started_s, *self._per_token(now_s, context), error)

    def _per_token(self, now_s: float, context: RequestContext | None) -> tuple[float | None, float | None]:
        """Seconds until the first token, and of each after it; the latter of a request with one answer alone."""
        if context is None or (first_s := context.first_token_s) is None:
            return None, None
        later = context.output_tokens - 1 if context.sessions == 1 else 0
        return first_s - self._started_s, (now_s - first_s) / later if later > 0 else None

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
