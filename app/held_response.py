"""One HTTP request to vLLM's server. Its response is held back until its status is certain. Pure ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from app.access.rate_limit import rate_limit_headers
from app.error_shape import STREAMED, event, is_anthropic, of_event, of_response, shaped
from app.errors import Answer, answer, error_body, type_of
from app.timings import TIMINGS, Timings
from deployments.cluster.request_context import RequestContext
from deployments.logs import of_request

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_CLIENT_ERRORS = ("ValueError", "VLLMClientError")  # by name, as this file does not import vllm
_FINGERPRINT = b'"system_fingerprint":"'
# What vLLM's /v1/responses streams before its engine has said anything.
_PRELUDE = (b"event: response.created", b"event: response.in_progress")

logger = logging.getLogger("baton.http")


class Exchange:
    """One request to the inner application and its response, which is held back until its status is certain.

    Once the response is replaced, or the server cancels this call, the inner application sees a disconnected client:
    it aborts what it still runs, and what it still sends is dropped.

    `status` is the response's, 0 before there is one. `failure`: the error that the client was told. `left`: the client
    went away before the end.
    """

    def __init__(
        self, context: RequestContext, body: bytes, receive: Receive, send: Send, timings: Timings = TIMINGS
    ) -> None:
        self.status = 0
        self.failure: Answer | None = None
        self._client_gone = self._anthropic = False
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
        self._anthropic = is_anthropic(scope)
        task = asyncio.ensure_future(inner(scope, self._receive, self._send))
        try:
            await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._leave()
            error = await _settle(task, self._close_s)
        if error is None:
            return
        refusal = None if self._context.error else _refusal(error)
        if refusal is None:  # else the error's words are the client's
            request_id = self._context.request_id
            logger.error("request %s: %r", request_id, error, exc_info=error, extra=of_request(request_id))
        failure = answer(self._context.error or error)
        if not self._begun:
            await self._replace(refusal or failure)
            return
        self.failure = self.failure or failure
        if not self._ended and self._streams_events():
            self._ended = True
            await self._outer_send({"type": "http.response.body", "body": event(failure, self._anthropic)})
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
            if not incoming.done():
                return {"type": "http.disconnect"}
            message = incoming.result()
            self._client_gone |= message["type"] == "http.disconnect" and not self._ended
            self._context.left |= self._client_gone
            return message
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
        elif self._context.explanation is not None:
            await self._replace(Answer(200, self._context.explanation))
        elif more and (failed or not body or body.startswith(_PRELUDE)):
            self._held += body
        elif failed:
            await self._replace(of_response(self._start["status"], self._held + body))
        elif self._streams_events() and (refusal := of_event(body)):
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
        await self._outer_send({**self._start, "headers": [*kept, *self._decision()]})
        await self._outer_send(marked)

    def _explained(self, message: Message) -> Message:
        """The error event with which a stream breaks off, in its API's shape.

        vLLM's server does not know which error of Baton's it is.
        """
        body: bytes = message.get("body", b"")
        if not body.startswith(STREAMED):
            return message
        failure = of_event(body) if self._context.error is None else answer(self._context.error)
        if failure is None:
            return message
        self.failure = failure
        return {**message, "body": event(failure, self._anthropic) + body.partition(b"\n\n")[2]}

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
        self.status, self.failure = response.status, response if response.status >= 400 else None
        await respond(self._outer_send, shaped(response, self._anthropic), [*kept, *self._decision()])
        self._leave()

    @property
    def left(self) -> bool:
        return self._client_gone or (not self._ended and self.failure is None)

    def _leave(self) -> None:
        if not self._gone.done():
            self._context.left |= self.left
            self._gone.set_result(None)

    def _streams_events(self) -> bool:
        headers: dict[bytes, bytes] = dict(self._start.get("headers", ())) if self._start else {}
        return headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def _decision(self) -> Headers:
        """How the session manager has decided, as far as it has."""
        modes, rules = sorted(self._context.modes), sorted(self._context.rules)
        pairs = ((b"x-baton-mode", modes), (b"x-baton-rule", rules))
        named = [(name, ",".join(values).encode("ascii", "replace")) for name, values in pairs if values]
        return [*named, *rate_limit_headers(self._context.quota, self._context.allowance)]


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


def _refusal(error: Exception) -> Answer | None:
    """The answer to a request that vLLM's server refuses after its stream of events has begun.

    Its handler, which would answer with 400, cannot answer any more, and Starlette raises another error over vLLM's.
    """
    cause = error.__cause__
    is_client_s = any(cls.__name__ in _CLIENT_ERRORS for cls in type(cause).__mro__)
    return Answer(400, error_body(str(cause), type_of(400), 400)) if is_client_s else None


def first(message: Message, receive: Receive) -> Receive:
    """`receive` that begins with a message that has been read."""
    left = [message]

    async def receive_it() -> Message:
        return left.pop() if left else await receive()

    return receive_it


async def respond(send: Send, response: Answer, headers: Headers | None = None) -> None:
    """Send a whole response with a JSON body."""
    body = json.dumps(response.body).encode()
    own = {"content-type": "application/json", "content-length": str(len(body)), **response.headers}
    pairs = [*(headers or []), *((name.encode(), value.encode()) for name, value in own.items())]
    await send({"type": "http.response.start", "status": response.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
