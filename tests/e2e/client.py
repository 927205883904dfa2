"""How the end-to-end tests talk to the cluster."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.cluster import Cluster

MODEL = "smollm2-135m-instruct"
TIMEOUT_S = 600.0


def body(prompt: list[int] | str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A completion request with greedy sampling that answers in token ids."""
    fixed = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return fixed | {"ignore_eos": True, "return_token_ids": True} | more


async def complete(client: httpx.AsyncClient, prompt: list[int] | str, max_tokens: int, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=body(prompt, max_tokens, **more))


async def tokens(client: httpx.AsyncClient, prompt: list[int], max_tokens: int, stream: bool = False) -> list[int]:
    """The answer's token ids, streamed or not."""
    return await answer_to(client, body(prompt, max_tokens), stream)


async def events(response: httpx.Response) -> Any:
    """The JSON events of a stream."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event


async def streamed(cluster: Cluster, prompt: list[int], max_tokens: int, **more: Any) -> Any:
    """The choices of a streamed answer, one after the other."""
    asked = body(prompt, max_tokens, stream=True, **more)
    async with client_of(cluster) as client, client.stream("POST", "/v1/completions", json=asked) as response:
        async for event in events(response):
            (choice,) = event["choices"]
            yield choice


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S)


async def until(what: Callable[[], bool], timeout_s: float, why: str) -> float:
    """Seconds until something holds; fails when it does not within `timeout_s`."""
    begun = time.monotonic()
    while not await asyncio.to_thread(what):
        assert time.monotonic() - begun < timeout_s, f"not within {timeout_s} s: {why}"
        await asyncio.sleep(0.05)
    return time.monotonic() - begun


@dataclass
class Said:
    """What came of one request under load. `asked`: its place in the load's questions; `at_s`: when it was asked."""

    asked: int
    at_s: float
    tokens: list[int] = field(default_factory=list)
    error: str = ""


class Load:
    """So many clients that ask in turn until its end; every other answer is streamed. What goes wrong, `said` tells.

    `questions`: a body each, with `return_token_ids`.
    """

    def __init__(self, cluster: Cluster, questions: list[dict[str, Any]], clients: int) -> None:
        self._cluster, self._questions, self._clients = cluster, questions, clients
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.said: list[Said] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._ask(first)) for first in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._tasks)

    async def _ask(self, first: int) -> None:
        async with client_of(self._cluster) as client:
            for number in itertools.count(first, self._clients):
                if self._over.is_set():
                    return
                said = Said(number % len(self._questions), time.monotonic())
                try:
                    said.tokens = await answer_to(client, self._questions[said.asked], stream=bool(number % 2))
                except (httpx.HTTPError, AssertionError) as error:
                    said.error = repr(error)
                self.said.append(said)


async def answer_to(client: httpx.AsyncClient, question: dict[str, Any], stream: bool) -> list[int]:
    """An answer's token ids. An AssertionError says what came instead of an answer."""
    if not stream:
        response = await client.post("/v1/completions", json=question)
        assert response.status_code == 200, response.text
        answer: list[int] = response.json()["choices"][0]["token_ids"]
        return answer
    streamed, finish = list[int](), list[str]()
    async with client.stream("POST", "/v1/completions", json=question | {"stream": True}) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for event in events(response):
            (choice,) = event["choices"]
            streamed += choice["token_ids"] or []
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert finish, "the stream broke off"
    return streamed
