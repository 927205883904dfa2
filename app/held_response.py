"""One HTTP request to vLLM's server. Its response is held back until its status is certain. Pure ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from app.errors import Answer, answer, of_status
from app.timings import TIMINGS, Timings
from deployments.cluster.request_context import RequestContext

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_STREAMED_ERROR = b'data: {"error"'
_MESSAGES_ERROR = b"event: error\ndata: "  # of /v1/messages
_FINGERPRINT = b'"system_fingerprint":"'
# What vLLM's /v1/responses streams before its engine has said anything.
_PRELUDE = (b"event: response.created", b"event: response.in_progress")

logger = logging.getLogger("baton.http")


class Exchange:
    """One request to the inner application and its response, which is held back until its status is certain.

    Once the response is replaced, or the server cancels this call, the inner application sees a disconnected client:
    it aborts what it still runs, and what it still sends is dropped.
    """

    def __init__(
        self, context: RequestContext, body: bytes, receive: Receive, send: Send, timings: Timings = TIMINGS
    ) -> None:
        self.status = 0
        self._context = context
        self._body: bytes | None = body
        self._outer_receive = receive
        self._outer_send = send
        self._close_s = timings.close_s
        self._start: Message | None = None
        self._held = b""
        self._begun = self._ended = False
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, inner: ASGIApp, scope: Scope) -> None:
        """Run the inner application until it ends or its response has been replaced. No task is left."""
        task = asyncio.ensure_future(inner(scope, self._receive, self._send))
        try:
            await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._leave()
            error = await _settle(task, self._close_s)
        if error is None:
            return
        logger.error("request %s: %r", self._context.request_id, error, exc_info=error)
        failure = answer(self._context.error or error)
        if not self._begun:
            await self._replace(failure)
        elif not self._ended and self._streams_events():
            await self._outer_send({"type": "http.response.body", "body": _event(failure)})
        elif not self._ended:  # a server breaks the connection off, so that the answer does not look whole
            raise error

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._gone.done():
            return {"type": "http.disconnect"}
        incoming = asyncio.ensure_future(self._outer_receive())
        try:
            await asyncio.wait((incoming, self._gone), return_when=asyncio.FIRST_COMPLETED)
            return incoming.result() if incoming.done() else {"type": "http.disconnect"}
        finally:
            incoming.cancel()

    async def _send(self, message: Message) -> None:
        if self._gone.done():
            return
        if self._begun:
            self._ended = not message.get("more_body", False)
            await self._outer_send(self._marked(self._explained(message)))
        elif message["type"] == "http.response.start":
            self._start = message
        elif message["type"] != "http.response.body":
            await self._outer_send(message)
        else:
            await self._first_body(message)

    async def _first_body(self, message: Message) -> None:
        assert self._start is not None, "a body before its start"
        body, more = message.get("body", b""), message.get("more_body", False)
        failed = self._start["status"] >= 400
        if self._context.error is not None:
            await self._replace(answer(self._context.error))
        elif more and (failed or not body or body.startswith(_PRELUDE)):
            self._held += body
        elif failed and not _has_error_object(self._held + body):
            await self._replace(of_status(self._start["status"], _text(self._held + body)))
        elif body.startswith(_STREAMED_ERROR) and (refusal := _streamed_refusal(body)):
            await self._replace(refusal)
        else:
            await self._begin({**message, "body": self._held + body})

    async def _begin(self, message: Message) -> None:
        assert self._start is not None
        self._begun, self._ended = True, not message.get("more_body", False)
        self.status = self._start["status"]
        marked = self._marked(message)
        longer = len(marked["body"]) - len(message["body"])
        own: Headers = list(self._start.get("headers", ()))
        kept = [(n, b"%d" % (int(v) + longer) if n.lower() == b"content-length" else v) for n, v in own]
        await self._outer_send({**self._start, "headers": [*kept, *self._placement()]})
        await self._outer_send(marked)

    def _explained(self, message: Message) -> Message:
        """The error event with which a stream breaks off, by Baton's error: vLLM's server does not know which it is."""
        error, body = self._context.error, message.get("body", b"")
        if error is None or not body.startswith((_STREAMED_ERROR, _MESSAGES_ERROR)):
            return message
        return {**message, "body": _event(answer(error), is_message=body.startswith(_MESSAGES_ERROR))}

    def _marked(self, message: Message) -> Message:
        """Mark the `system_fingerprint` of a seed's answer that several engines have given.

        This is OpenAI's sign that the same seed may give another answer another time. vLLM's server puts it into
        the last chunk of a stream, or into the one body.
        """
        if not self._context.seed_moved:
            return message
        return {**message, "body": message.get("body", b"").replace(_FINGERPRINT, _FINGERPRINT + b"moved-")}

    async def _replace(self, response: Answer) -> None:
        """Answer in the inner application's place, with its headers (such as CORS's), and end that application."""
        kept = [] if self._start is None else list(self._start.get("headers", ()))
        kept = [(name, value) for name, value in kept if not name.lower().startswith(b"content-")]
        self._begun = self._ended = True
        self.status = response.status
        await respond(self._outer_send, response, [*kept, *self._placement()])
        self._leave()

    def _leave(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    def _streams_events(self) -> bool:
        headers: dict[bytes, bytes] = dict(self._start.get("headers", ())) if self._start else {}
        return headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def _placement(self) -> Headers:
        modes, rules = sorted(self._context.modes), sorted(self._context.rules)
        pairs = ((b"x-baton-mode", modes), (b"x-baton-rule", rules))
        return [(name, ",".join(values).encode("ascii", "replace")) for name, values in pairs if values]


async def _settle(task: asyncio.Future[None], close_s: float) -> Exception | None:
    """Wait for an application whose client is gone, then cancel it and wait again, both `close_s` at most.

    Returns its error.
    """
    try:
        await asyncio.wait((task,), timeout=close_s)
    finally:
        task.cancel()
    await asyncio.wait((task,), timeout=close_s)
    error = task.exception() if task.done() and not task.cancelled() else None
    return error if isinstance(error, Exception) else None


def _event(failure: Answer, is_message: bool = False) -> bytes:
    """A failure as an event of a stream. `is_message`: a stream of /v1/messages, whose events name their type twice."""
    prefix, body = (_MESSAGES_ERROR, {"type": "error", **failure.body}) if is_message else (b"data: ", failure.body)
    return prefix + json.dumps(body).encode() + b"\n\n"


async def respond(send: Send, response: Answer, headers: Headers | None = None) -> None:
    """Send a whole response with a JSON body."""
    body = json.dumps(response.body).encode()
    own = {"content-type": "application/json", "content-length": str(len(body)), **response.headers}
    pairs = [*(headers or []), *((name.encode(), value.encode()) for name, value in own.items())]
    await send({"type": "http.response.start", "status": response.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _has_error_object(body: bytes) -> bool:
    try:
        parsed = json.loads(body)
    except ValueError:
        return False
    return isinstance(parsed, dict) and isinstance(parsed.get("error"), dict)


def _text(body: bytes) -> str:
    """The message in a body of another shape: `{"error": text}`, `{"detail": text}` or plain text."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:1000]
    found = parsed.get("error", parsed.get("detail")) if isinstance(parsed, dict) else parsed
    return found if isinstance(found, str) else json.dumps(found)


def _streamed_refusal(event: bytes) -> Answer | None:
    """The error with which a stream begins, when it names its HTTP status."""
    try:
        body = json.loads(event.removeprefix(b"data: ").split(b"\n\n", 1)[0])
    except ValueError:
        return None
    status = body["error"].get("code") if isinstance(body["error"], dict) else None
    return Answer(status, body) if isinstance(status, int) and 400 <= status <= 599 else None
