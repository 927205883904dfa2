"""`/baton/explain` in front of a toy server: what it asks of it, and what it answers instead."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.api import Gateway
from app.explain import explained_scope
from app.held_response import Receive, Scope, Send
from configs.schema import IngressConfig
from deployments.cluster.request_context import RequestContext, current
from deployments.errors import Unavailable
from tests.app.toys import OK, STREAM, Control, Toy, body, start

FOUND = {"policy": "joint", "decision": {"outcome": "waits", "reason": "full"}}


class Server(Toy):
    """Notes the path that it is asked at, and sets an explanation as the cluster core does."""

    def __init__(self, *messages: Any, error: Exception | None = None) -> None:
        super().__init__(*messages)
        self.error, self.path, self.contexts = error, "", list[RequestContext]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path = scope["path"]
        context = current.get()
        assert context is not None
        self.contexts.append(context)
        if context.explains:
            context.explanation, context.error = (FOUND, None) if self.error is None else (None, self.error)  # type: ignore[assignment]
        await super().__call__(scope, receive, send)


async def ask(server: Toy, asked: Any, method: str = "POST", **more: Any) -> httpx.Response:
    observed: list[int] = []
    gateway = Gateway(server, IngressConfig(), Control(), observe=lambda _, status: observed.append(status))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        content = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        answer = await http.request(method, "/baton/explain", content=content, **more)
    assert observed == [], "it is no request that metrics count"
    return answer


@pytest.mark.parametrize("messages", [OK, STREAM])
@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "stream": True}, "/v1/chat/completions"),
        ({"prompt": "a"}, "/v1/completions"),
        ({"prompt": [1, 2], "unknown": {"messages": 1}}, "/v1/completions"),
    ],
)
async def test_the_server_reads_the_body_as_the_request_s_and_the_answer_is_the_explanation(
    messages: Any, asked: Any, path: str
) -> None:
    server = Server(*messages)
    answer = await ask(server, asked, headers={"x-baton-class": "fast"})
    assert (answer.status_code, answer.json()) == (200, FOUND)
    assert answer.headers["content-type"] == "application/json"
    assert (server.path, json.loads(server.body)) == (path, asked)
    (context,) = server.contexts
    assert (context.explains, context.priority, context.chat) == (True, "fast", path == "/v1/chat/completions")


@pytest.mark.parametrize("asked", [{}, {"input": "a"}, [1], b"no json", b"", b"[" * 5000])
async def test_what_is_no_such_request_is_a_400_and_reaches_no_server(asked: Any) -> None:
    server = Server(*OK)
    answer = await ask(server, asked)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert server.calls == 0


async def test_other_methods_are_refused() -> None:
    for method in ("GET", "PUT"):
        answer = await ask(Server(*OK), {"prompt": "a"}, method)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_what_the_server_or_the_manager_refuses_stays_refused() -> None:
    refused = Toy(start(400), body(b'{"error": {"message": "too long", "code": 400}}'))
    answer = await ask(refused, {"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")
    away = await ask(Server(*OK, error=Unavailable("away")), {"prompt": "a"})
    assert (away.status_code, away.json()["error"]["code"]) == (503, "no_replica_available")


def test_a_route_prefix_is_kept() -> None:
    scope = {"type": "http", "path": "/chat/baton/explain", "root_path": "/chat"}
    assert explained_scope(scope, b'{"prompt": 1}')["path"] == "/chat/v1/completions"


async def test_a_request_that_is_served_is_not_explained() -> None:
    server = Server(*OK)
    gateway = Gateway(server, IngressConfig(), Control())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        answer = await http.post("/v1/completions", json={"prompt": "a"})
    assert answer.json() == {}
    assert not server.contexts[0].explains
