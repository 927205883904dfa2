"""Serve's own proxy, as with `serve run` or `make serve PROXY=serve`, over mock engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.client import answer_to, until
from tests.e2e.cluster import Cluster, processes, started
from tests.e2e.proxied import is_served

BACK_WITHIN_S = 300.0
pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started("mock.yaml", tmp_path_factory.mktemp("proxy"), options=("--proxy=serve",)) as cluster:
        yield cluster


async def test_clients_are_served_through_it(mock: Cluster) -> None:
    assert not [line for line in processes(mock.marker).values() if "/haproxy" in line.partition(" ")[0]]
    await is_served(mock)


async def test_an_ingress_that_is_killed_breaks_its_answers_and_the_next_one_serves(mock: Cluster) -> None:
    """An answer that has not begun, as one that is not streamed, is a 500 of the proxy's."""
    long = {"model": "mock", "prompt": [100] * 40, "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        whole = asyncio.create_task(client.post("/v1/completions", json=long))
        async with client.stream("POST", "/v1/completions", json=long | {"stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await until(lambda: mock.decoding(2), BACK_WITHIN_S, "both are being answered")
            mock.kill("ingress")
            with pytest.raises(httpx.HTTPError):
                async for _ in lines:
                    pass
        assert (await whole).status_code == 500
        short = await client.post("/v1/completions", json=long | {"max_tokens": 5})
        assert short.json()["usage"]["completion_tokens"] == 5, "it waited for the next ingress"
    status = await asyncio.to_thread(mock.settled)
    assert status["sessions"]["closed"]["orphaned"] == 2


async def test_ctrl_c_lets_answers_end(mock: Cluster) -> None:
    """The last test: it stops the application."""
    question = {"model": "mock", "prompt": [200] * 40, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=mock.url, timeout=BACK_WITHIN_S) as client:
        whole = await answer_to(client, question | {"return_token_ids": True}, stream=False)
        answer = asyncio.create_task(answer_to(client, question | {"return_token_ids": True}, stream=True))
        await until(lambda: mock.status()["sessions"]["open"] == 1, BACK_WITHIN_S, "it is being answered")
        await asyncio.to_thread(mock.application.stop)
        assert await answer == whole
