"""`/baton/prefixes` in front of a toy server: what is asked of the manager, and who may ask."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.api import Gateway
from app.held_response import Receive, Scope, Send
from app.timings import Timings
from configs.schema import IngressConfig
from deployments.cluster.request_context import RequestContext, current
from deployments.errors import PrefixRefused, Unavailable
from deployments.manager.calls import Prefixes
from tests.app.toys import OK, Manager, Toy

QUICK = Timings(control_s=0.05)
ONE = {"id": "f00", "tokens": 40, "blocks": 2, "replicas": ["a"], "missing": []}


class Server(Toy):
    """Notes what it is asked, and sets what the cluster core would."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(*OK)
        self.error, self.path, self.contexts = error, "", list[RequestContext]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path, context = scope["path"], current.get()
        assert context is not None
        self.contexts.append(context)
        if context.pins:
            context.explanation, context.error = (ONE, None) if self.error is None else (None, self.error)  # type: ignore[assignment]
        await super().__call__(scope, receive, send)


async def ask(
    method: str,
    path: str = "/baton/prefixes",
    asked: Any = None,
    server: Server | None = None,
    manager: Manager | None = None,
    given: str = "secret",
    **config: Any,
) -> httpx.Response:
    observed: list[int] = []
    gateway = Gateway(
        server or Server(),
        IngressConfig(admin_key="secret", **config),
        manager or Manager(),
        timings=QUICK,
        observe=lambda _, status: observed.append(status),
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        content = b"" if asked is None else json.dumps(asked).encode()
        answer = await http.request(method, path, content=content, headers={"x-baton-admin-key": given})
    assert observed == [], "it is no request that metrics count"
    assert gateway._bounds._open == {}, "no answer is open"
    return answer


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ({"messages": [{"role": "system", "content": "a"}], "stream": True}, "/v1/chat/completions"),
        ({"prompt": "a", "cache_salt": "t"}, "/v1/completions"),
    ],
)
async def test_the_server_reads_the_body_as_the_request_s_and_the_answer_is_the_pin(asked: Any, path: str) -> None:
    server = Server()
    answer = await ask("POST", asked=asked, server=server)
    assert (answer.status_code, answer.json()) == (200, ONE)
    assert (server.path, json.loads(server.body)) == (path, asked)
    (context,) = server.contexts
    assert (context.pins, context.explains, context.is_served, context.quota) == (True, False, False, None)


@pytest.mark.parametrize("asked", [{}, [1], {"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}])
async def test_what_is_not_one_prompt_is_a_400_and_reaches_no_server(asked: Any) -> None:
    server = Server()
    answer = await ask("POST", asked=asked, server=server)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_prefix_request")
    assert server.calls == 0


async def test_what_does_not_fit_is_a_409_with_the_reason() -> None:
    answer = await ask("POST", asked={"prompt": "a"}, server=Server(PrefixRefused("too many blocks")))
    assert answer.status_code == 409
    assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == ("prefix_refused", "too many blocks")


async def test_they_are_listed_and_unpinned() -> None:
    manager = Manager({"prefixes": [ONE]})
    listed = await ask("GET", manager=manager)
    assert (listed.status_code, listed.json()) == (200, {"prefixes": [ONE]})
    gone = await ask("DELETE", "/baton/prefixes/f00", manager=manager)
    assert (gone.status_code, gone.json()) == (200, {"id": "f00", "unpinned": True})
    assert manager.asked == [Prefixes(), Prefixes(unpin="f00")]
    unknown = await ask("DELETE", "/baton/prefixes/f00", manager=Manager({"refused": "no prefix f00 is pinned"}))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "prefix_not_found")


@pytest.mark.parametrize("answer", [None, Unavailable("gone")])
async def test_a_manager_that_is_away_is_a_503_in_time(answer: Any) -> None:
    for method, path in (("GET", "/baton/prefixes"), ("DELETE", "/baton/prefixes/f00")):
        said = await ask(method, path, manager=Manager(answer))
        assert (said.status_code, said.json()["error"]["code"]) == (503, "manager_away")


@pytest.mark.parametrize(("method", "path"), [("POST", "/baton/prefixes"), ("DELETE", "/baton/prefixes/f00")])
async def test_others_than_administrators_change_nothing(method: str, path: str) -> None:
    server, manager = Server(), Manager({"prefixes": []})
    answer = await ask(method, path, {"prompt": "a"}, server, manager, given="wrong")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_only")
    assert (server.calls, manager.asked) == (0, [])


@pytest.mark.parametrize(("method", "path"), [("PUT", "/baton/prefixes"), ("GET", "/baton/prefixes/f00")])
async def test_other_methods_are_refused(method: str, path: str) -> None:
    answer = await ask(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_where_caches_are_apart_it_is_pinned_for_the_key_that_is_named() -> None:
    for path, namespace in (("/baton/prefixes?key=acme", "key acme"), ("/baton/prefixes", "")):
        server = Server()
        await ask("POST", path, {"prompt": "a"}, server, separate_caches=True)
        assert server.contexts[0].namespace == namespace
    server = Server()
    await ask("POST", "/baton/prefixes?key=acme", {"prompt": "a"}, server)
    assert server.contexts[0].namespace is None
