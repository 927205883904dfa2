"""Stored responses: around vLLM's server, behind its check of API keys. Pure ASGI; knows nothing of Ray or vLLM.

vLLM's server makes each response alone and stores nothing. What came before in a conversation reaches it as input. Its
answers go to the store that all ingresses share.
"""

from __future__ import annotations

import json
from urllib.parse import parse_qs

from starlette.responses import StreamingResponse

from app import input_items
from app.background import Order, Runs
from app.errors import (
    Answer,
    BadResponseRequest,
    MethodNotAllowed,
    RequestError,
    ResponseNotFound,
    StoredResponsesOff,
    answer,
)
from app.foreground import Foreground
from app.held_response import ASGIApp, Receive, Scope, Send, first, respond
from app.request_identity import owner_of
from app.response_events import response_from
from app.response_follower import Follower
from app.response_request import Wanted, inner_body, items_of, new_id, shown, wanted
from app.timings import TIMINGS, Timings
from deployments.cluster.request_context import RequestContext, current
from deployments.errors import SessionError
from deployments.stored import calls
from deployments.stored.calls import Store, Stored

PATH = "/v1/responses"
_OFF = "stored responses are off on this server, and {} needs them: `ingress.stored_responses` switches them on"
_ACTIONS = ("", "cancel", "input_items")
_NEEDS_STORE = (b'"background"', b'"previous_response_id"')
_EVENT_STREAM = "text/event-stream"


class StoredResponses:
    """An ASGI middleware. `store`: None where `ingress.stored_responses` is not set. `runs`: of this ingress."""

    def __init__(
        self,
        app: ASGIApp,
        store: Store | None = None,
        runs: Runs | None = None,
        max_body_bytes: int = 0,
        timings: Timings = TIMINGS,
    ) -> None:
        self._app, self._store, self._runs = app, store, runs
        self._max_body_bytes, self._timings = max_body_bytes, timings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        reply = self._app
        try:
            if path == PATH and scope["method"] == "POST":
                body = await _body(receive)
                receive, reply = _given(body, receive), await self._created(scope, body)
            elif path.startswith(f"{PATH}/"):
                reply = await self._found(scope, path.removeprefix(f"{PATH}/"))
        except (RequestError, SessionError) as error:
            reply = _json(answer(error))
        await reply(scope, receive, send)

    # ---- making one

    async def _created(self, scope: Scope, body: bytes) -> ASGIApp:
        """What answers a request for a new response."""
        if self._store is None and not any(name in body for name in _NEEDS_STORE):
            return self._app
        asked = wanted(body)
        if asked is None or not (asked.store or asked.needs_store):
            return self._app
        if self._store is None or self._runs is None:
            if asked.needs_store:
                raise StoredResponsesOff(_OFF.format("`background`" if asked.background else "`previous_response_id`"))
            return self._app
        owner, response_id = owner_of(scope), new_id()
        items = items_of(asked, await self._previous(self._store, asked, owner))
        body = inner_body(asked, response_id, items, self._max_body_bytes)
        kept = json.dumps(items).encode()
        if asked.background:
            order = Order(response_id, owner, kept, asked.stream, lambda response: shown(response, asked, True))
            return await self._begun(self._runs, order, scope, body)
        foreground = Foreground(self._app, self._store, asked, response_id, Stored(owner, "", b"", kept))
        return _with_body(foreground, body) if asked.store else _with_body(self._app, body)

    async def _previous(self, store: Store, asked: Wanted, owner: str) -> Stored | None:
        if asked.previous is None:
            return None
        previous = await store.ask(calls.Get(asked.previous, owner))
        if previous is None:
            raise _not_found(asked.previous)
        return previous

    async def _begun(self, runs: Runs, order: Order, scope: Scope, body: bytes) -> ASGIApp:
        """A background response, which runs from here on."""
        of = current.get() or RequestContext(order.response_id)
        context = of.for_background()
        run = await runs.start(order, context, self._app, _scope(scope, body), body)
        if run.refusal is not None:
            return _json(run.refusal)
        if order.streamed:
            return StreamingResponse(run.follow(), media_type=_EVENT_STREAM)
        return _json(Answer(200, run.started.result() or {}))

    # ---- asking for one

    async def _found(self, scope: Scope, rest: str) -> ASGIApp:
        """What answers a request for a response that there is."""
        response_id, _, action = rest.partition("/")
        if self._store is None and action in _ACTIONS:
            raise StoredResponsesOff(_OFF.format(f"{scope['method']} {scope['path']}"))
        if self._store is None or action not in _ACTIONS or not response_id:
            return self._app  # it has no such route
        owner = owner_of(scope)
        match scope["method"], action:
            case "POST", "cancel":
                return await self._cancelled(self._store, response_id, owner)
            case "DELETE", "":
                return await self._deleted(self._store, response_id, owner)
            case "GET" | "HEAD", "":
                query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
                return await self._retrieved(self._store, response_id, owner, query)
            case "GET" | "HEAD", "input_items":
                query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
                return await self._input_items(self._store, response_id, owner, query)
        raise MethodNotAllowed(f"{scope['path']} does not answer {scope['method']}")

    async def _retrieved(self, store: Store, response_id: str, owner: str, query: dict[str, list[str]]) -> ASGIApp:
        stream, after = query.get("stream", ["false"])[-1].lower(), query.get("starting_after", ["-1"])[-1]
        if stream in ("true", "1"):
            if not after.removeprefix("-").isdecimal() or len(after) > 9:
                raise BadResponseRequest("starting_after must be the number of an event")
            follower = Follower(store, response_id, owner, int(after) + 1, self._timings)
            if not await follower.begin():
                raise _not_found(response_id)
            return StreamingResponse(follower.events(), media_type=_EVENT_STREAM)
        found = await store.ask(calls.Get(response_id, owner))
        if found is None:
            raise _not_found(response_id)
        return _json(Answer(200, response_from(found)))

    async def _input_items(self, store: Store, response_id: str, owner: str, query: dict[str, list[str]]) -> ASGIApp:
        found = await store.ask(calls.Get(response_id, owner))
        if found is None:
            raise _not_found(response_id)
        return _json(Answer(200, input_items.page(found, response_id, query)))

    async def _cancelled(self, store: Store, response_id: str, owner: str) -> ASGIApp:
        found = await store.ask(calls.Get(response_id, owner))
        if found is not None and not found.background:
            raise BadResponseRequest("only a background response can be cancelled")
        found = await store.ask(calls.Cancel(response_id, owner))
        if found is None:
            raise _not_found(response_id)
        if self._runs is not None and found.status == "cancelled":
            self._runs.stop(response_id)  # where it runs elsewhere, that ingress hears of it with its next report
        return _json(Answer(200, response_from(found)))

    async def _deleted(self, store: Store, response_id: str, owner: str) -> ASGIApp:
        if not await store.ask(calls.Delete(response_id, owner)):
            raise _not_found(response_id)
        if self._runs is not None:
            self._runs.stop(response_id)
        return _json(Answer(200, {"id": response_id, "object": "response", "deleted": True}))


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(f"no response {response_id[:100]!r} is stored for this API key")


def _json(reply: Answer) -> ASGIApp:
    async def send_it(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, reply)

    return send_it


def _with_body(app: ASGIApp, body: bytes) -> ASGIApp:
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await app(_scope(scope, body), _given(body, receive), send)

    return run


def _scope(scope: Scope, body: bytes) -> Scope:
    """The scope for another body."""
    headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}


async def _body(receive: Receive) -> bytes:
    """The whole body, which the gateway has bounded."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _given(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives a body that has been read."""
    return first({"type": "http.request", "body": body, "more_body": False}, receive)
