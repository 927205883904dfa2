"""An HTTP client's way to an ASGI application in the same process. Unlike httpx's own, it hands out what is streamed
as it comes, and a client that closes its response has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from app.held_response import ASGIApp, Message


class Streamed(httpx.AsyncByteStream):
    """One call of the application, and the body of its response."""

    def __init__(self, app: ASGIApp, scope: dict[str, Any], content: bytes) -> None:
        self.start: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": content, "more_body": False})
        self._outgoing: asyncio.Queue[Message | None] = asyncio.Queue()
        self._call = asyncio.ensure_future(app(scope, self._incoming.get, self._send))
        self._call.add_done_callback(self._ended)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start.set_result(message)
        else:
            self._outgoing.put_nowait(message)

    def _ended(self, call: asyncio.Future[None]) -> None:
        self._outgoing.put_nowait(None)
        if not self.start.done():
            self.start.set_exception(call.exception() or RuntimeError("no response"))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._outgoing.get()) is not None:
            yield message["body"]

    async def aclose(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})
        await asyncio.wait([self._call])


class StreamingTransport(httpx.AsyncBaseTransport):
    """Calls `app` for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": request.url.query,
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 1),
            "root_path": "",
        }
        stream = Streamed(self._app, scope, await request.aread())
        try:
            start = await stream.start
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return httpx.Response(start["status"], headers=start["headers"], stream=stream)
