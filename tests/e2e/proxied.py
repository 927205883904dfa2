"""What a client sees of a proxy, whichever it is, over mock engines."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx

from tests.e2e.client import events, until
from tests.e2e.cluster import Cluster


async def is_served(cluster: Cluster) -> None:
    """Answers whole and streamed, errors and headers arrive; a client that leaves ends its session."""
    cancelled = cluster.status()["sessions"]["closed"].get("cancelled", 0)
    body = {"model": "mock", "prompt": list(range(100, 160)), "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client:
        whole = await client.post("/v1/completions", json=body | {"return_token_ids": True})
        assert whole.headers["x-baton-mode"] == "disaggregated"
        tokens = whole.json()["choices"][0]["token_ids"]
        streamed = body | {"stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=streamed) as response:
            assert response.headers["x-baton-mode"] == "disaggregated"
            chunks = [event async for event in events(response)]
        assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or ()] == tokens
        wrong = await client.post("/v1/completions", json=body | {"model": "none"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "model")
        named = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        assert named.headers["x-request-id"] == "mine"
        async with client.stream("POST", "/v1/completions", json=streamed | {"max_tokens": 1900}) as response:
            async for _ in response.aiter_lines():
                break  # a proxy that kept chunks back would pass this on with the whole answer, and none were cancelled
        for _ in range(6):
            await _leave_before_the_answer_begins(client, cluster, body | {"max_tokens": 1900})
    await until(lambda: not cluster.status()["sessions"]["open"], 60.0, "the clients are gone")
    await until(
        lambda: cluster.status()["sessions"]["closed"].get("cancelled", 0) == cancelled + 7, 60.0, "and that is counted"
    )


async def _leave_before_the_answer_begins(client: httpx.AsyncClient, cluster: Cluster, body: dict[str, Any]) -> None:
    """An answer that is not streamed begins when it is whole."""
    waiting = asyncio.create_task(client.post("/v1/completions", json=body))
    await until(lambda: cluster.status()["sessions"]["open"] == 1, 60.0, "it is computed")
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await until(lambda: not cluster.status()["sessions"]["open"], 60.0, "it was noticed that its client is gone")
