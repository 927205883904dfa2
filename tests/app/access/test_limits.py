"""The limits of a key under 50 clients at once, over two ingresses and one session manager."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import httpx
import pytest

from app.access.gate import Gate
from app.access.keys import parse
from app.api import Gateway
from app.held_response import ASGIApp, Message, Receive, Scope, Send
from configs.schema import IngressConfig
from deployments.cluster.refusal import refusal
from deployments.cluster.request_context import current
from deployments.manager.calls import Close, Manager, Open, Report, Status
from deployments.manager.client import ManagerClient
from deployments.manager.manager import SessionManager
from deployments.manager.server import ManagerServer
from deployments.messages import Admit, Phase, ReplicaSnapshot, SessionRequest
from tests.app.access.test_keys import entry
from tests.app.toys import body, start
from tests.deployments.manager.test_manager import BLOCK, BOTH, D0, P0, Clock, config

CLIENTS, REQUESTS, PROMPT, LONGEST = 50, 20, BLOCK, BLOCK
SECRET = "a secret of the tests"


def server(manager: Manager, name: str) -> ASGIApp:
    """In place of vLLM's server and the cluster core: each answer is a session, which writes half of what it may."""
    numbers = iter(range(10**6))

    async def session(request: SessionRequest) -> None:
        context = current.get()
        assert context is not None
        decision = await manager.ask(Open(request))
        context.allowance = decision.allowance or context.allowance
        if isinstance(decision, Admit):
            await asyncio.sleep(0)
            epoch = decision.placement.epoch
            await manager.ask(Close(request.session_id, epoch, "stop", LONGEST // 2, ended=True))
        else:
            context.fail(refusal(decision))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked = json.loads((await receive())["body"])
        context = current.get()
        assert context is not None
        requests = [
            SessionRequest(f"{name}{next(numbers)}", PROMPT, LONGEST, BOTH, quota=context.next_quota())
            for _ in range(asked.get("n", 1))
        ]
        await asyncio.gather(*map(session, requests))
        message: Message
        for message in (start(), body(b"{}")):
            await send(message)

    return app


@pytest.fixture
async def manager() -> SessionManager:
    manager = SessionManager(config(), Clock())
    for replica in (P0, D0):
        await manager.ask(Report(ReplicaSnapshot(replica.replica_id, 1, Phase.READY, replica)))
    return manager


async def flood(manager: SessionManager, limits: dict[str, int], **asked: int) -> list[httpx.Response]:
    """What 50 clients get that ask two ingresses, each of which has a connection of its own to the manager."""
    keys = parse("keys:\n" + entry("a", "k", **limits) + entry("free", "f"), ("default",))
    listening = ManagerServer(manager, SECRET)
    await listening.start("127.0.0.1")

    async def where() -> str:
        return listening.address

    callers = [ManagerClient(where, SECRET) for _ in range(2)]
    apps = [
        Gateway(server(caller, name), IngressConfig(), caller, gate=Gate(lambda: keys))
        for caller, name in zip(callers, "xy", strict=True)
    ]
    ways = [httpx.AsyncClient(transport=httpx.ASGITransport(each), base_url="http://baton") for each in apps]
    headers = {"authorization": "Bearer k"}

    async def client(number: int) -> list[httpx.Response]:
        return [await ways[(number + i) % 2].post("/v1/completions", json=asked, headers=headers) for i in range(4)]

    try:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*map(client, range(CLIENTS)))
            free = await ways[0].post("/v1/completions", json=asked, headers={"authorization": "Bearer f"})
        assert free.status_code == 200, "another key has its own limits"
        assert not any(name.startswith("x-ratelimit") for name in free.headers)
    finally:
        for http in ways:
            await http.aclose()
        for caller in callers:
            caller.shutdown()
        await listening.retire()
    return [response for each in answers for response in each]


def check(responses: list[httpx.Response], served: int, code: str) -> None:
    assert Counter(response.status_code for response in responses) == {200: served, 429: len(responses) - served}
    for response in responses:
        if response.status_code == 429:
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}, "as OpenAI has it"
            assert (error["type"], error["code"]) == ("rate_limit_error", code)
            assert "the key a has" in error["message"]
            assert response.headers["retry-after"] == "61"


async def test_requests_are_counted_exactly(manager: SessionManager) -> None:
    responses = await flood(manager, {"requests_per_minute": REQUESTS})
    check(responses, REQUESTS, "requests_per_minute")
    left = {
        status: {
            int(each.headers["x-ratelimit-remaining-requests"]) for each in responses if each.status_code == status
        }
        for status in (200, 429)
    }
    assert (max(left[200]), min(left[200])) == (REQUESTS - 1, 0), "what waits for a place is counted, too"
    assert left[429] == {0}
    assert {response.headers["x-ratelimit-limit-requests"] for response in responses} == {str(REQUESTS)}
    assert {response.headers["x-ratelimit-reset-requests"] for response in responses} == {"1m1s"}
    assert not any("x-ratelimit-limit-tokens" in response.headers for response in responses)
    assert (await manager.ask(Status()))["keys"]["a"]["requests"] == REQUESTS


async def test_a_request_of_several_answers_counts_once(manager: SessionManager) -> None:
    check(await flood(manager, {"requests_per_minute": REQUESTS}, n=3), REQUESTS, "requests_per_minute")


async def test_tokens_are_never_more_than_the_limit_and_what_is_not_used_serves_others(manager: SessionManager) -> None:
    used, limit = PROMPT + LONGEST // 2, 500
    responses = await flood(manager, {"tokens_per_minute": limit})
    served = sum(response.status_code == 200 for response in responses)
    check(responses, served, "tokens_per_minute")
    assert (limit - PROMPT - LONGEST) / used < served <= limit / used
    assert (await manager.ask(Status()))["keys"]["a"]["tokens"] == served * used
