"""How the end-to-end tests talk to the cluster."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.e2e.cluster import Cluster

MODEL = "smollm2-135m-instruct"
TIMEOUT_S = 240.0


def body(prompt: list[int] | str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A completion request with greedy sampling that answers in token ids."""
    fixed = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return fixed | {"ignore_eos": True, "return_token_ids": True} | more


async def complete(client: httpx.AsyncClient, prompt: list[int] | str, max_tokens: int, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=body(prompt, max_tokens, **more))


async def tokens(client: httpx.AsyncClient, prompt: list[int], max_tokens: int, stream: bool = False) -> list[int]:
    """The answer's token ids, streamed or not."""
    if not stream:
        response = await complete(client, prompt, max_tokens)
        assert response.status_code == 200, response.text
        answer: list[int] = response.json()["choices"][0]["token_ids"]
        return answer
    streamed: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body(prompt, max_tokens, stream=True)) as response:
        assert response.status_code == 200
        async for event in events(response):
            streamed += event["choices"][0]["token_ids"] or []
    return streamed


async def events(response: httpx.Response) -> Any:
    """The JSON events of a stream."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S)


async def until(what: Callable[[], bool], timeout_s: float, why: str) -> float:
    """Seconds until something holds; fails when it does not within `timeout_s`."""
    begun = time.monotonic()
    while not await asyncio.to_thread(what):
        assert time.monotonic() - begun < timeout_s, f"not within {timeout_s} s: {why}"
        await asyncio.sleep(0.05)
    return time.monotonic() - begun
