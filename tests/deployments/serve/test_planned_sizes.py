"""One plan sizes the pools of a real Serve cluster, with mock engines: configs/mock-scaling.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.client import Load, until
from tests.e2e.cluster import Cluster, started

BACK_WITHIN_S = 300.0
pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    patient: dict[str, Any] = {"interactive": {"tpot_s": 0.1}, "batch": {"rank": 1}}
    directory = tmp_path_factory.mktemp("planned")
    with started("mock-scaling.yaml", directory, classes=patient, queue_timeout_s=BACK_WITHIN_S) as cluster:
        yield cluster


def question(first: int, tokens: int) -> dict[str, Any]:
    fixed = {"model": "mock", "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, "prompt": [first + number for number in range(100)]}


def size(cluster: Cluster, pool: str) -> int:
    """The replicas of a pool; -1 while any replica comes or goes."""
    running = cluster.running()
    return len(running.get(pool, ())) if running else -1


async def reason(cluster: Cluster, pool: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=BACK_WITHIN_S) as client:
        plan: dict[str, Any] = (await client.get("/baton/status")).json()["scaling"]["pools"][pool]
    return plan


async def test_pools_follow_the_load_and_no_request_fails(planned: Cluster) -> None:
    """One pool grows and shrinks. The other one, for another class, goes to no replica and comes back for a request."""
    async with Load(planned, [question(200 + 7 * each, 300) for each in range(8)], 16) as load:
        await until(lambda: size(planned, "decode-main") >= 2, BACK_WITHIN_S, "decode grows")
        assert (await reason(planned, "decode-main"))["target"] >= 2
    async with Load(planned, [question(300, 20)], 1) as light:
        await until(lambda: size(planned, "decode-main") == 1, BACK_WITHIN_S, "decode shrinks")
        await until(lambda: size(planned, "decode-large") == 0, BACK_WITHIN_S, "no request is for the large pool")
    assert [said.error for said in (*load.said, *light.said) if said.error] == []
    assert (await reason(planned, "decode-large"))["target"] == 0
    async with httpx.AsyncClient(base_url=planned.url, timeout=BACK_WITHIN_S) as client:
        headers = {"X-Baton-Class": "batch"}
        woken = await client.post("/v1/completions", json=question(400, 8), headers=headers)
    assert woken.status_code == 200, woken.text
