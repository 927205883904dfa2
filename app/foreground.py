"""A response that its client waits for: it goes to the store before its client has the whole of it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from app.held_response import ASGIApp, Message, Receive, Scope, Send
from app.response_events import Events, Response, changed, is_last, response_of
from app.response_request import Wanted, shown
from deployments.errors import StoreAway
from deployments.stored.calls import Put, Store, Stored

logger = logging.getLogger(__name__)


class Foreground:
    """An ASGI application around vLLM's for one request, whose response it stores.

    The client gets its answer where the store does not take it, too; `store` in the response is then false. `empty`:
    what is stored, without the response.
    """

    def __init__(self, app: ASGIApp, store: Store, asked: Wanted, response_id: str, empty: Stored) -> None:
        self._app, self._store, self._asked = app, store, asked
        self._response_id, self._empty = response_id, empty

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._streamed(send) if self._asked.stream else self._whole(send)
        await self._app(scope, receive, run)

    def _whole(self, send: Send) -> Send:
        """Passes a response on that comes as one body."""
        start: Message = {}
        body = b""

        async def take(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if message.get("more_body", False):
                return
            if start["status"] == 200 and isinstance(response := json.loads(body), dict):
                body = json.dumps(await self._stored(response)).encode()
            headers = [pair for pair in start.get("headers", ()) if pair[0].lower() != b"content-length"]
            await send({**start, "headers": [*headers, (b"content-length", b"%d" % len(body))]})
            await send({**message, "body": body})

        return take

    def _streamed(self, send: Send) -> Send:
        """Passes the events of a stream on."""
        events = Events()
        is_stream = False

        async def take(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                is_stream = message["status"] == 200
            if not is_stream or message["type"] != "http.response.body":
                await send(message)
                return
            for event in events.take(message.get("body", b"")):
                await send({"type": "http.response.body", "body": await self._event(event), "more_body": True})
            if not message.get("more_body", False):
                await send({**message, "body": events.rest})

        return take

    async def _event(self, event: bytes) -> bytes:
        if is_last(event) and (response := response_of(event)) is not None:
            stored = await self._stored(response)
            return changed(event, lambda _: stored)
        return changed(event, lambda response: shown(response, self._asked, True))

    async def _stored(self, response: Response) -> Response:
        """The response as the client gets it, once the store has it or has refused it."""
        response = shown(response, self._asked, True)
        stored = replace(self._empty, status=response["status"], response=json.dumps(response).encode())
        try:
            is_stored = await self._store.ask(Put(self._response_id, stored))
        except StoreAway as error:
            logger.warning("response %s is not stored: %s", self._response_id, error)
            is_stored = False
        return {**response, "store": is_stored}
