"""The mock engine fills in for the real one by configuration only: configs/mock.yaml under Serve, over real NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e import cluster as clusters
from tests.e2e.cluster import Cluster, total

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = clusters.start("mock.yaml", tmp_path_factory.mktemp("mock"))
    try:
        yield cluster
    finally:
        left = clusters.stop(cluster)
    assert not left, f"processes outlived the application: {left}"


def ask(prompt: list[int], **more: object) -> dict[str, object]:
    fixed = {"model": "mock", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return fixed | {"return_token_ids": True} | more


async def test_split_answers_equal_unsplit_ones(mock: Cluster) -> None:
    """A mock's tokens are made from the KV it finds, so what NIXL carried between processes was right."""
    prompts = [[100 + 7 * i + j for j in range(9 + 31 * i)] for i in range(8)]
    async with httpx.AsyncClient(base_url=mock.url, timeout=60) as client:
        split = await asyncio.gather(*(client.post("/v1/completions", json=ask(prompt)) for prompt in prompts))
        whole = await asyncio.gather(
            *(client.post("/v1/completions", json=ask(prompt, frequency_penalty=0.1)) for prompt in prompts)
        )
    assert {response.headers["x-baton-mode"] for response in split} == {"disaggregated"}
    assert {response.headers["x-baton-mode"] for response in whole} == {"decode_local"}
    tokens = [[response.json()["choices"][0]["token_ids"] for response in kind] for kind in (split, whole)]
    assert tokens[0] == tokens[1]


async def test_many_at_once_leave_nothing(mock: Cluster) -> None:
    async with httpx.AsyncClient(base_url=mock.url, timeout=60) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=ask([i, i + 1, i + 2], max_tokens=20)) for i in range(100, 200))
        )
    assert [answer.status_code for answer in answers] == [200] * 100
    status = await asyncio.to_thread(mock.settled)
    assert mock.used_blocks() == 0
    assert total(status, "decode", "preemptions") == 0
    assert total(status, "decode", "handoffs_received") >= 100
    assert total(status, "decode", "open_receiving") == total(status, "prefill", "open_writing") == 0
