"""Large bodies wait: unread while their client sends others, and read until it is their turn to be checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from app import large_bodies
from app.api import Gateway
from app.held_response import Message, Receive, Scope, Send
from app.in_turn import MOST_WAITING, InTurn
from app.large_bodies import AT_ONCE, LARGE_BYTES
from configs.schema import IngressConfig
from deployments.cluster.request_context import current
from tests.app.toys import OK, Control

LARGE, SMALL = b'{"prompt": "' + b"x" * LARGE_BYTES + b'"}', b'{"prompt": "x"}'
PATIENCE_S = 60.0


class Held:
    """An application whose answers wait for `go`. `came`: the clients whose requests came, in their order."""

    def __init__(self, begins_session: bool = False) -> None:
        self.came: list[str] = []
        self.go = asyncio.Event()
        self._begins_session = begins_session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = current.get()
        assert context is not None
        await receive()
        self.came.append(context.client)
        if self._begins_session:
            context.note_session((), [])
        await self.go.wait()
        for message in OK:
            await send(message)


class Asked:
    """One POST to an application. `read`: whether its body was taken in."""

    def __init__(self, gateway: Gateway, body: bytes, key: str, length: bool = True) -> None:
        self.status, self.read = 0, False
        sizes = [(b"content-length", str(len(body)).encode())] if length else [(b"transfer-encoding", b"chunked")]
        headers = [(b"authorization", f"Bearer {key}".encode()), *sizes]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            self.read = True
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError("it has no other message")

        async def send(message: Message) -> None:
            self.status = message.get("status", self.status)

        self.task = asyncio.ensure_future(gateway({**scope, "asgi": {"version": "3.0"}}, receive, send))

    async def over(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        return self.status


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def rest() -> None:
    """Let every task go on as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


def gateway(inner: Any) -> Gateway:
    return Gateway(inner, IngressConfig(), Control())


async def test_large_bodies_of_a_client_wait_unread_and_nothing_else_does() -> None:
    held = Held()
    whole = gateway(held)
    first = [Asked(whole, LARGE, "a") for _ in range(AT_ONCE)]
    await until(lambda: len(held.came) == AT_ONCE)
    waiting = [Asked(whole, LARGE, "a"), Asked(whole, LARGE, "a", length=False)]
    others = [Asked(whole, SMALL, "a"), Asked(whole, LARGE, "b")]
    await until(lambda: len(held.came) == AT_ONCE + len(others))
    await rest()
    assert [each.read for each in waiting] == [False, False]
    held.go.set()
    assert {await each.over() for each in (*first, *waiting, *others)} == {200}


async def test_a_client_with_very_many_large_bodies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    monkeypatch.setattr(large_bodies, "MOST_WAITING", 2)
    whole = gateway(held)
    asked = [Asked(whole, LARGE, "a") for _ in range(AT_ONCE + 3)]
    await until(lambda: any(each.task.done() for each in asked))
    held.go.set()
    assert sorted([await each.over() for each in asked]) == [200] * (AT_ONCE + 2) + [429]


async def test_a_client_that_leaves_while_it_waits_keeps_nothing() -> None:
    held = Held()
    whole = gateway(held)
    asked = [Asked(whole, LARGE, "a") for _ in range(AT_ONCE + 1)]
    await until(lambda: len(held.came) == AT_ONCE)
    for each in (asked[0], asked[-1]):  # one that is served, and the one that waits
        each.task.cancel()
    await asyncio.wait([asked[0].task, asked[-1].task])
    again = Asked(whole, LARGE, "a")
    await until(lambda: len(held.came) == AT_ONCE + 1)
    held.go.set()
    assert await again.over() == 200
    assert {await each.over() for each in asked[1:-1]} == {200}


async def test_one_large_body_at_a_time_is_checked_and_small_ones_beside_it() -> None:
    held = Held()
    whole = gateway(InTurn(held))
    asked = [Asked(whole, LARGE, key) for key in "aaab"]
    await until(lambda: len(held.came) == 1)
    asked.append(Asked(whole, SMALL, "a"))
    await until(lambda: len(held.came) == 2)
    await rest()
    assert len(held.came) == 2
    held.go.set()
    assert {await each.over() for each in asked} == {200}
    large = [held.came[0], *held.came[2:]]
    of_the_first = [client == large[0] for client in large]
    assert of_the_first == [True, True, False, True], "the other client does not wait for all of them"


async def test_the_next_large_body_comes_when_the_session_of_the_one_before_has_begun() -> None:
    held = Held(begins_session=True)
    whole = gateway(InTurn(held))
    asked = [Asked(whole, LARGE, "a") for _ in range(3)]
    await until(lambda: len(held.came) == 3)
    held.go.set()
    assert {await each.over() for each in asked} == {200}


async def test_the_queue_of_large_bodies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "AT_ONCE", MOST_WAITING + 2)
    held = Held()
    whole = gateway(InTurn(held))
    asked = [Asked(whole, LARGE, "a") for _ in range(MOST_WAITING + 2)]
    await until(lambda: any(each.task.done() for each in asked))
    held.go.set()
    assert sorted([await each.over() for each in asked]) == [200] * (MOST_WAITING + 1) + [429]


async def test_an_application_that_fails_gives_its_turn_back() -> None:
    calls = 0

    async def fails_once(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("of this request")
        for message in OK:
            await send(message)

    whole = gateway(InTurn(fails_once))
    assert await Asked(whole, LARGE, "a").over() >= 400
    assert await Asked(whole, LARGE, "a").over() == 200
