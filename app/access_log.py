"""What is written of each request when it is over: one JSON line, and the end of its span where it is traced.

The lines are of the logger `baton.access`, on the ingress's standard output. Without `start` the logger is off, and a
request costs one look at it. No line holds text of a prompt or an answer.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from app.errors import Answer
from app.held_response import ASGIApp, Message, Receive, Scope, Send
from app.request_span import RequestSpan
from deployments.cluster.request_context import RequestContext

if TYPE_CHECKING:
    from deployments.tracing.tracer import Tracer

logger = logging.getLogger("baton.access")
_LONGEST = 500
"""Characters of a path or a reason."""


def start() -> None:
    """Let the lines of this process go to its standard output, and nowhere else."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class Entry:
    """One request, from its arrival on. Nothing is done for its tokens one by one.

    `key`: the name of its API key. `span`: None where it is not traced.
    """

    __slots__ = ("_method", "_path", "_request_id", "_started_s", "key", "span")

    def __init__(self, scope: Mapping[str, Any], request_id: str) -> None:
        self._started_s = time.monotonic()
        self._request_id = request_id
        self._method, self._path = scope["method"], scope["path"]
        self.key: str | None = None
        self.span: RequestSpan | None = None

    def trace(self, tracer: Tracer, scope: Mapping[str, Any]) -> None:
        """Begin its span, at its arrival."""
        self.span = RequestSpan(tracer, scope, self._request_id, self._started_s)

    async def around(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run an application that answers the request, and write what became of it."""
        status, error, is_whole = 0, b"", False

        async def watched(message: Message) -> None:
            nonlocal status, error, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400:
                error += message.get("body", b"")
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await app(scope, receive, watched)
        finally:
            failure = Answer(status, json.loads(error)) if is_whole and status >= 400 else None
            self.write(status, failure, left=not is_whole)

    def write(
        self, status: int, failure: Answer | None = None, context: RequestContext | None = None, left: bool = False
    ) -> None:
        """It is over. `status`: 0 where the client got none. `failure`: what it was told. `left`: it went away."""
        outcome = _outcome(status, failure, left)
        if self.span is not None:
            self.span.end(status, outcome, failure, context, self.key)
        if not logger.isEnabledFor(logging.INFO):
            return
        now_s = time.monotonic()
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self._request_id,
            "method": self._method,
            "path": self._path[:_LONGEST],
            "status": status or None,
            "outcome": outcome,
            "total_s": round(now_s - self._started_s, 4),
        }
        if self.key is not None:
            line["key"] = self.key
        if self.span is not None:
            line["trace_id"] = self.span.span.trace_id
        if context is not None:
            first_s = context.first_token_s
            line |= {
                "class": context.priority or None,
                "mode": ",".join(sorted(context.modes)) or None,
                "rule": ",".join(sorted(context.rules)) or None,
                "prompt_tokens": context.prompt_tokens,
                "output_tokens": context.output_tokens,
                "ttft_s": None if first_s is None else round(first_s - self._started_s, 4),
            }
        if failure is not None:
            line |= {"code": failure.body["error"]["code"], "reason": _reason(failure)}
        logger.info("%s", json.dumps(line))


def _reason(failure: Answer) -> str | None:
    """Why, in words; None where the words may be the client's: vLLM's, and of what is wrong with a request's content.

    Errors of Baton's own table have a code that is text.
    """
    error = failure.body["error"]
    is_ours = isinstance(error["code"], str) and failure.status not in (400, 404)
    return error["message"][:_LONGEST] if is_ours else None


def _outcome(status: int, failure: Answer | None, left: bool) -> str:
    """`ok`, `error`, `broken_off` (an error after the response had begun) or `client_left`."""
    if left:
        return "client_left"
    if failure is None:
        return "ok"
    return "error" if status >= 400 else "broken_off"
