"""Baton's own routes, and the middleware around vLLM's server: limits, request ids, placement headers, errors.

Pure ASGI; knows nothing of Ray or vLLM. A response's start is held back until its first content, so that a
session that failed before its first token becomes a real status and not a 200 with an error event.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.access.gate import KEY, Gate, check_admin, key_of, quota_of
from app.access_log import Entry
from app.batches.paths import is_batch_route
from app.batches.paths import off as batches_off
from app.body_text import check_text
from app.body_types import check_types
from app.body_values import check_values
from app.bounds import Bounds, parts_of
from app.error_shape import is_anthropic, shaped
from app.errors import (
    BadExplainRequest,
    BadPrefixRequest,
    BodyTimeout,
    BodyTooLarge,
    RequestError,
    TooManyForClient,
    answer,
)
from app.explain import EXPLAIN, check_method, explained_scope
from app.held_response import ASGIApp, Exchange, Message, Receive, Scope, Send, respond
from app.large_bodies import LargeBodies
from app.live.page import Page
from app.own_routes import OwnRoutes
from app.pace import Pace, PacedSend
from app.prefixes import begin_pin, pins
from app.request_identity import address_of, client_of, request_context
from app.timings import TIMINGS, Timings
from configs.schema import IngressConfig
from deployments.cluster.request_context import RequestContext, current
from deployments.errors import GrammarTooLong, Overloaded, TooManyParts
from deployments.manager.calls import Manager

if TYPE_CHECKING:
    from deployments.tracing.tracer import Tracer

REQUEST_ID = b"x-request-id"
_MAX_REQUEST_ID = 128
_READ = (REQUEST_ID, b"traceparent", b"tracestate")
"""Headers that the inner application does not get as they came."""

logger = logging.getLogger(__name__)


class Gateway:
    """An ASGI application around vLLM's: Baton's own routes, and everything else through the middleware.

    `echo_request_id`: False where the proxy in front answers with the header itself, as Serve's does.
    `observe` is called with every request that reached the inner application, and its status.
    `page`: the live page; None: there is none.
    `max_queued_requests`: how many may wait for a place; 0: any number. `gate`: None where no request needs an API key.
    `batches`: answers `/v1/files` and `/v1/batches`, whose bodies it reads itself.
    `tracer`: what makes the spans of requests; None where nothing is traced.
    `counters` counts requests by the modes that served them, by rule, and errors by HTTP status.
    """

    def __init__(
        self,
        inner: ASGIApp,
        config: IngressConfig,
        manager: Manager,
        echo_request_id: bool = True,
        observe: Callable[[RequestContext, int], None] = lambda context, status: None,
        timings: Timings = TIMINGS,
        max_queued_requests: int = 0,
        page: Page | None = None,
        gate: Gate | None = None,
        tracer: Tracer | None = None,
        batches: ASGIApp = batches_off,
    ) -> None:
        self.counters: dict[str, dict[str, int]] = {"modes": {}, "rules": {}, "errors": {}}
        self._inner, self._gate = inner, gate
        self._config = config
        self._echo = echo_request_id
        self._observe = observe
        self._timings = timings
        self._bounds, self._pace = Bounds(config, max_queued_requests), Pace(config.refusals_per_s)
        self._large = LargeBodies()
        self._page, self._tracer, self._batches = page, tracer, batches
        self._own = OwnRoutes(manager, config, timings, self.counters)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request_id = _request_id(scope)
        entry = Entry(scope, request_id)
        if self._echo:
            send = _with_header(send, REQUEST_ID, request_id.encode())
        if self._gate is not None:
            try:
                key = self._gate.admit(scope)
            except RequestError as error:
                await self._turn_away(error, scope, send, entry)
                return
            if key is not None:
                entry.key, scope = key.name, {**scope, KEY: key}
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        get = scope["method"] in ("GET", "HEAD")
        if get and self._page is not None and (shown := await self._page.at(path)) is not None:
            entry.write(shown.status_code)
            await shown(scope, receive, send)
            return
        if is_batch_route(path):
            await entry.around(self._batches, scope, receive, send)
            return
        if (own := await self._own.at(path, scope)) is None:
            await self._forward(scope, receive, send, request_id, entry)
            return
        await respond(send, own)
        entry.write(own.status, own if own.status >= 400 else None)

    async def _turn_away(self, error: RequestError, scope: Scope, send: Send, entry: Entry) -> None:
        """Refuse a request for its key. The pace is that of its address, as it can make up any number of keys."""
        refusal = answer(error)
        _count(self.counters["errors"], str(refusal.status))
        paced = PacedSend(self._pace, address_of(scope, self._config.client_header), send)
        await respond(paced, shaped(refusal, is_anthropic(scope)))
        entry.write(refusal.status, refusal)

    async def _forward(self, scope: Scope, receive: Receive, send: Send, request_id: str, entry: Entry) -> None:
        if self._tracer is not None:
            entry.trace(self._tracer, scope)
        client = client_of(scope, self._config.client_header)
        paced = PacedSend(self._pace, client, send)
        try:
            await self._forward_paced(client, scope, receive, paced, request_id, entry)
        finally:
            paced.end_turn()

    async def _forward_paced(
        self, client: str, scope: Scope, receive: Receive, send: PacedSend, request_id: str, entry: Entry
    ) -> None:
        explains, is_pinned = scope["path"].removeprefix(scope.get("root_path", "")) == EXPLAIN, pins(scope)
        try:
            if explains:
                check_method(scope)
            if is_pinned:
                check_admin(scope, self._config.admin_key)
            send.turn = await self._large.take(client, scope)
            body = await _read_body(scope, receive, self._config.max_body_bytes, self._timings.body_s)
            if body is None:  # the client is gone: it left while it was sending
                entry.write(0, left=True)
                return
            send.body_bytes = len(body)
            if explains or is_pinned:
                scope = explained_scope(scope, body, BadExplainRequest if explains else BadPrefixRequest)
            check_values(scope, body, self._config.max_values, self._config.max_grammar_characters)
            if send.turn is not None:
                await asyncio.sleep(0)  # others are served between two looks at a large body
            check_text(body)
            check_types(body)
            context = request_context(request_id, scope, body, client, self._config.separate_caches)
            context.span = None if entry.span is None else entry.span.span
            context.explains, context.most_parts = explains, self._bounds.most_parts
            if is_pinned:
                begin_pin(context, scope, parts_of(body))
            parts = self._bounds.enter(client, body)
            context.quota = quota_of(key_of(scope), parts) if context.is_served else None
        except (RequestError, GrammarTooLong, TooManyParts, Overloaded) as error:
            refusal, body = answer(error), b""
            if isinstance(error, TooManyForClient | Overloaded):
                await send.delay()
            _count(self.counters["errors"], str(refusal.status))
            await respond(send, shaped(refusal, is_anthropic(scope)))
            entry.write(refusal.status, refusal)
            return
        context.when_begun.append(send.end_turn)
        exchange = Exchange(context, body, receive, send, self._timings)
        token = current.set(context)
        try:
            await exchange.run(self._inner, _inner_scope(scope, request_id))
        finally:
            current.reset(token)
            self._bounds.leave(client, parts)
            self._tally(context, exchange.status)
            entry.write(exchange.status, exchange.failure, context, exchange.left)

    def _tally(self, context: RequestContext, status: int) -> None:
        for mode in context.modes:
            _count(self.counters["modes"], str(mode))
        for rule in context.rules:
            _count(self.counters["rules"], rule)
        if status >= 400:
            _count(self.counters["errors"], str(status))
        if context.is_served:
            self._observe(context, status)


async def _read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes | None:
    """The whole body, or None when the client is gone. `limit` is in bytes.

    Raises BodyTooLarge before it reads past the limit, and BodyTimeout.
    """
    declared = _header(scope, b"content-length") or b"0"
    too_large = BodyTooLarge(f"the request body is over {limit} bytes")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
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
        raise BodyTimeout(f"the request body took over {timeout_s:.0f} s") from None


def _inner_scope(scope: Scope, request_id: str) -> Scope:
    """The scope for the inner application.

    `spec_version` is 2.3: `send` never raises for a client that is gone, so the inner application must listen for that.
    vLLM's server looks for a key in `Authorization` alone; Anthropic's API has it in `X-Api-Key`. Of `traceparent` it
    would only say that it does not trace.
    """
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _READ]
    key = _header(scope, b"x-api-key")
    if key and is_anthropic(scope) and _header(scope, b"authorization") is None:
        headers.append((b"authorization", b"Bearer " + key))
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


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1
