"""Our own routes, and the middleware around vLLM's server: limits, request ids, placement headers, errors.

Pure ASGI; knows nothing of Ray or vLLM. A response's start is held back until its first content, so that a
session that failed before its first token becomes a real status and not a 200 with an error event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Protocol

from app.errors import Answer, BodyTimeout, BodyTooLarge, MethodNotAllowed, RequestError, answer, of_status
from configs.schema import IngressConfig
from deployments.request_context import RequestContext, current

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CONTROL_TIMEOUT_S = 2.0
BODY_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 1.0
REQUEST_ID = b"x-request-id"
_MAX_REQUEST_ID = 128
_STREAMED_ERROR = b'data: {"error"'
# What vLLM's /v1/responses streams before its engine has said anything.
_PRELUDE = (b"event: response.created", b"event: response.in_progress")

logger = logging.getLogger(__name__)


class ControlPort(Protocol):
    """What the HTTP side asks of the control plane. Either call may raise; later than 2 s is no answer."""

    async def ready(self) -> dict[str, Any]:
        """`{"ready": bool, "pools": {name: {"ready": bool, "replicas": [...]}}}`."""
        ...

    async def status(self) -> dict[str, Any]:
        """Anything that JSON can hold."""
        ...


class Gateway:
    """An ASGI application around vLLM's: our routes, and everything else through the middleware.

    `echo_request_id`: off where the proxy in front answers with the header itself, as Serve's does.
    `observe` is called with every request that reached the inner application, and its status.
    `counters` counts requests by the modes that served them, by rule, and errors by HTTP status.
    """

    def __init__(
        self,
        inner: ASGIApp,
        config: IngressConfig,
        port: ControlPort,
        echo_request_id: bool = True,
        observe: Callable[[RequestContext, int], None] = lambda context, status: None,
    ) -> None:
        self.counters: dict[str, dict[str, int]] = {"modes": {}, "rules": {}, "errors": {}}
        self._inner = inner
        self._config = config
        self._port = port
        self._echo = echo_request_id
        self._observe = observe
        self._routes = {"/health": self._health, "/ready": self._ready, "/baton/status": self._status}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request_id = _request_id(scope)
        if self._echo:
            send = _with_header(send, REQUEST_ID, request_id.encode())
        route = self._routes.get(scope["path"].removeprefix(scope.get("root_path", "")))
        if route is None:
            await self._forward(scope, receive, send, request_id)
        elif scope["method"] not in ("GET", "HEAD"):
            await _respond(send, answer(MethodNotAllowed(f"{scope['path']} answers GET only")))
        else:
            await _respond(send, await route())

    async def _health(self) -> Answer:
        return Answer(200, {"status": "alive"})

    async def _ready(self) -> Answer:
        state, _ = await _ask(self._port.ready())
        pools = state.get("pools") or {}
        ready = bool(pools) and all(pool.get("ready") for pool in pools.values())
        return Answer(200 if ready else 503, {"pools": {}, **state, "ready": ready})

    async def _status(self) -> Answer:
        state, answered = await _ask(self._port.status())
        return Answer(200 if answered else 503, {**state, "ingress": self.counters})

    async def _forward(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        try:
            body = await _read_body(scope, receive, self._config.max_body_bytes)
        except RequestError as error:
            refusal = answer(error)
            _count(self.counters["errors"], str(refusal.status))
            await _respond(send, refusal)
            return
        if body is None:  # the client left while it was sending
            return
        context = RequestContext(request_id)
        exchange = _Exchange(context, body, receive, send)
        token = current.set(context)
        try:
            await exchange.run(self._inner, _inner_scope(scope, request_id))
        finally:
            current.reset(token)
            self._tally(context, exchange.status)

    def _tally(self, context: RequestContext, status: int) -> None:
        for mode in context.modes:
            _count(self.counters["modes"], str(mode))
        for rule in context.rules:
            _count(self.counters["rules"], rule)
        if status >= 400:
            _count(self.counters["errors"], str(status))
        self._observe(context, status)


class _Exchange:
    """One request to the inner application and its response, held back until it is known what it will be.

    Once the response is replaced, or the server cancels us, the inner application sees a disconnected client:
    it aborts what it still runs, and what it still says is dropped.
    """

    def __init__(self, context: RequestContext, body: bytes, receive: Receive, send: Send) -> None:
        self.status = 0
        self._context = context
        self._body: bytes | None = body
        self._outer_receive = receive
        self._outer_send = send
        self._start: Message | None = None
        self._held = b""
        self._begun = self._ended = False
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, inner: ASGIApp, scope: Scope) -> None:
        """Run the inner application until it ends or its response has been replaced; leaves no task."""
        task = asyncio.ensure_future(inner(scope, self._receive, self._send))
        try:
            await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._leave()
            error = await _settle(task)
        if error is None:
            return
        logger.error("request %s: %r", self._context.request_id, error, exc_info=error)
        failure = answer(self._context.error or error)
        if not self._begun:
            await self._replace(failure)
        elif not self._ended and self._streams_events():
            event = b"data: " + json.dumps(failure.body).encode() + b"\n\n"
            await self._outer_send({"type": "http.response.body", "body": event})
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
            await self._outer_send(message)
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
        headers = [*self._start.get("headers", ()), *self._placement()]
        await self._outer_send({**self._start, "headers": headers})
        await self._outer_send(message)

    async def _replace(self, response: Answer) -> None:
        """Answer in the inner application's place, keeping its headers (such as CORS's), and be rid of it."""
        kept = [] if self._start is None else list(self._start.get("headers", ()))
        kept = [(name, value) for name, value in kept if not name.lower().startswith(b"content-")]
        self._begun = self._ended = True
        self.status = response.status
        await _respond(self._outer_send, response, [*kept, *self._placement()])
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


async def _settle(task: asyncio.Future[None]) -> Exception | None:
    """See out an application that believes its client gone, at last by cancellation; returns its error."""
    try:
        await asyncio.wait((task,), timeout=CLOSE_TIMEOUT_S)
    finally:
        task.cancel()
    await asyncio.wait((task,), timeout=CLOSE_TIMEOUT_S)
    error = task.exception() if task.done() and not task.cancelled() else None
    return error if isinstance(error, Exception) else None


async def _ask(call: Coroutine[Any, Any, dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """The control plane's answer and True; `{"error": why}` and False when it gives none in time."""
    try:
        return await asyncio.wait_for(call, CONTROL_TIMEOUT_S), True
    except Exception as error:  # noqa: BLE001 - whatever keeps it from answering is the answer
        logger.warning("the control plane did not answer: %r", error)
        return {"error": f"{type(error).__name__}: {error}".rstrip(": ")}, False


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None when the client left. Raises BodyTooLarge before reading past the limit."""
    declared = _header(scope, b"content-length") or b"0"
    too_large = BodyTooLarge(f"the request body is over {limit} bytes")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise BodyTimeout(f"the request body took over {BODY_TIMEOUT_S:.0f} s") from None


def _inner_scope(scope: Scope, request_id: str) -> Scope:
    """`spec_version` 2.3: our `send` never raises for a client that left, so the inner side must listen."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != REQUEST_ID]
    asgi = {**scope.get("asgi", {}), "spec_version": "2.3"}
    return {**scope, "asgi": asgi, "headers": [*headers, (REQUEST_ID, request_id.encode())]}


def _request_id(scope: Scope) -> str:
    given = _header(scope, REQUEST_ID) or b""
    if 0 < len(given) <= _MAX_REQUEST_ID and all(0x21 <= byte <= 0x7E for byte in given):
        return given.decode("ascii")
    return uuid.uuid4().hex


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key.lower() == name), None)


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            others = [pair for pair in message.get("headers", ()) if pair[0].lower() != name]
            message = {**message, "headers": [*others, (name, value)]}
        await send(message)

    return wrapped


async def _respond(send: Send, response: Answer, headers: Headers | None = None) -> None:
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
    """What a body of another shape says: `{"error": text}`, `{"detail": text}` or plain text."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:1000]
    found = parsed.get("error", parsed.get("detail")) if isinstance(parsed, dict) else parsed
    return found if isinstance(found, str) else json.dumps(found)


def _streamed_refusal(event: bytes) -> Answer | None:
    """The error with which a stream begins, when it says which HTTP status it is."""
    try:
        body = json.loads(event.removeprefix(b"data: ").split(b"\n\n", 1)[0])
    except ValueError:
        return None
    status = body["error"].get("code") if isinstance(body["error"], dict) else None
    return Answer(status, body) if isinstance(status, int) and 400 <= status <= 599 else None


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1
