"""Toy applications under the gateway, and a client above it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from app.api import Gateway
from app.held_response import ASGIApp, Message, Receive, Scope, Send
from app.timings import TIMINGS, Timings
from configs.schema import IngressConfig
from deployments.cluster.request_context import current
from deployments.manager.calls import Call, Ready, Status

POOLS = {"prefill": {"ready": True, "replicas": []}, "decode-a": {"ready": True, "replicas": []}}


class Control:
    def __init__(self, answer: Any = None, delay_s: float = 0.0) -> None:
        self.answer = {"ready": True, "pools": POOLS} if answer is None else answer
        self.delay_s = delay_s

    async def ask(self, call: Call[Any]) -> Any:
        assert isinstance(call, Ready | Status)
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return dict(self.answer)


class Manager:
    """Gives this answer to each call, or raises it, and notes the calls. None: it takes too long."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.asked = answer, list[Any]()

    async def ask(self, call: Call[Any]) -> Any:
        self.asked.append(call)
        if self.answer is None:
            await asyncio.sleep(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Toy:
    """Reads the request, then sends `messages`; `act` runs in between, with the request's context."""

    def __init__(self, *messages: Message, act: Any = None) -> None:
        self.messages = messages
        self.act = act
        self.calls = 0
        self.body = b""
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        self.headers = dict(scope["headers"])
        assert len(self.headers) == len(scope["headers"]), "a header came twice"
        self.body = (await receive())["body"]
        context = current.get()
        assert context is not None
        if self.act:
            await self.act(context, receive)
        for message in self.messages:
            await send(message)


def start(status: int = 200, kind: bytes = b"application/json", *more: tuple[bytes, bytes]) -> Message:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), *more],
    }


def body(content: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


OK = (start(), body(b"{}"))
STREAM = (
    start(kind=b"text/event-stream; charset=utf-8"),
    body(b"data: 1\n\n", True),
    body(b"data: [DONE]\n\n"),
)


def client(
    inner: ASGIApp, control: Control | None = None, limit: int = 100, timings: Timings = TIMINGS, **config: Any
) -> httpx.AsyncClient:
    gateway = Gateway(inner, IngressConfig(max_body_bytes=limit, **config), control or Control(), timings=timings)
    return httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton")


async def post(
    inner: ASGIApp, timings: Timings = TIMINGS, path: str = "/v1/completions", **kwargs: Any
) -> httpx.Response:
    async with client(inner, timings=timings) as http:
        return await http.post(path, **{"content": b"{}", **kwargs})


async def call_by_hand(inner: ASGIApp, seen: list[Message], *then: Message) -> None:
    """One POST by hand: messages to the client into `seen`, messages from it after the body from `then`."""
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    for message in ({"type": "http.request", "body": b"{}", "more_body": False}, *then):
        incoming.put_nowait(message)

    async def send(message: Message) -> None:
        seen.append(message)

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "asgi": {"version": "3.0"}}
    async with asyncio.timeout(60):
        await Gateway(inner, IngressConfig(), Control())(scope, incoming.get, send)
