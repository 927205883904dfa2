"""Large bodies one after the other, clients in turn. Pure ASGI.

Until the first of its answers has begun, a large body costs the ingress much: it is parsed, checked, rendered and
tokenised. One of them at a time leaves the rest of the ingress to the other requests.
"""

from __future__ import annotations

from app.body_values import values_at_most
from app.errors import answer
from app.held_response import ASGIApp, Message, Receive, Scope, Send, first, respond
from app.large_bodies import LARGE_BYTES
from app.turns import Turns
from deployments.cluster.request_context import current
from deployments.errors import Overloaded

LARGE_VALUES = 2048
MOST_WAITING = 16
"""Large requests of one client that may wait for their turn."""


class InTurn:
    """An ASGI middleware. It goes behind the check of API keys: what that refuses needs no turn."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._turns = app, Turns(MOST_WAITING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = current.get() if scope["type"] == "http" and scope["method"] == "POST" else None
        if context is None:
            await self._app(scope, receive, send)
            return
        message = await receive()
        receive, body = first(message, receive), message.get("body", b"")
        if len(body) <= LARGE_BYTES and values_at_most(scope, body) <= LARGE_VALUES:
            await self._app(scope, receive, send)
            return
        try:
            turn = await self._turns.take(context.client)
        except Overloaded as error:
            await respond(send, answer(error))
            return
        context.when_begun.append(turn.end)

        async def send_and_end(message: Message) -> None:
            turn.end()
            await send(message)

        try:
            await self._app(scope, receive, send_and_end)
        finally:
            turn.end()
