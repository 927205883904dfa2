"""Two replicas of one mixed pool: each prefills and decodes, and either goes on with what the other one has lost.

They fetch from each other.

The first file by name: the other tests' cluster has not started then, and one group of engines runs at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.launch.serve_api import ServeApi
from tests.e2e.adapters import ADMIN_KEY
from tests.e2e.client import MODEL, client_of, complete, streamed, tokens, until
from tests.e2e.cluster import NAME, PATIENCE_S, Cluster, started
from tests.e2e.conftest import CROWD, LONG_ANSWER_TOKENS, prompt, questions
from tests.e2e.mover import mover_of

pytestmark = [pytest.mark.engine, pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

POOL = "mixed-main"
COMPARED = [*(f"crowd-{i}" for i in range(CROWD)), "length-600", "length-1800", "recovery-700", "recovery-1500"]
OTHERS = [(300, 48), (700, 48), (1100, 24), (1500, 24)]
"""Prompt and answer tokens of requests beside them, of which no prompt was there before."""
SEEDS = itertools.count(80_000)
SHARED, TAILS = 4 * 128, (30, 60)
"""Tokens that two prompts share: four blocks; and what each of the two has behind them."""
FAMILIES, BACK_WITHIN_S = 2, 300.0


@pytest.fixture(scope="module")
def mixed(reference: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """configs/cpu-mixed.yaml, running. The plain engine's process has ended before."""
    more = {"ingress": {"admin_key": ADMIN_KEY}}
    with started("cpu-mixed.yaml", tmp_path_factory.mktemp("mixed"), more=more, fetch=True) as cluster:
        yield cluster


def pids(cluster: Cluster) -> dict[str, int]:
    """The process of each replica."""
    details = ServeApi(cluster.dashboard_url).details_within(PATIENCE_S)
    replicas = details["applications"][NAME]["deployments"][POOL]["replicas"]
    return {replica["replica_id"]: replica["pid"] for replica in replicas}


async def ask_at_once(cluster: Cluster, reference: dict[str, list[int]]) -> None:
    asked = questions()
    async with client_of(cluster) as client:
        compared = [tokens(client, *asked[name]) for name in COMPARED]
        others = [complete(client, prompt(next(SEEDS), length), most) for length, most in OTHERS]
        told, beside = await asyncio.gather(asyncio.gather(*compared), asyncio.gather(*others))
    assert dict(zip(COMPARED, told, strict=True)) == {name: reference[name] for name in COMPARED}
    assert [response.status_code for response in beside] == [200] * len(OTHERS)


def counted(status: dict[str, Any], counter: str) -> list[float]:
    """A counter of each replica."""
    return [replica["counters"].get(counter, 0.0) for replica in status["replicas"].values()]


async def test_both_replicas_do_both_and_answers_equal_one_plain_engines(
    mixed: Cluster, reference: dict[str, list[int]]
) -> None:
    await ask_at_once(mixed, reference)
    after = await asyncio.to_thread(mixed.settled)
    assert after["modes"]["decode_local"] > 0, "some answers are written where their prompt is computed"
    for counter in ("computed_tokens", "generated_tokens"):
        assert min(counted(after, counter)) > 0, counter
    assert sum(counted(after, "preemptions")) == 0


async def test_an_answer_goes_on_on_the_other_replica_with_its_kv_cache(
    mixed: Cluster, reference: dict[str, list[int]]
) -> None:
    asked, _ = questions()["recovery-long"]
    before = await asyncio.to_thread(mixed.settled)
    told, moved = list[int](), 0
    with mover_of(mixed, POOL) as mover:
        async for choice in streamed(mixed, asked, LONG_ANSWER_TOKENS):
            told += choice["token_ids"] or []
            if len(told) >= 5 and not moved:
                moved = await asyncio.to_thread(mover.let_go, POOL)
    assert moved in {1, 2}, "twice where the other replica is asked only when it has the answer already"
    assert told == reference["recovery-long"]
    after = await asyncio.to_thread(mixed.settled)
    closed = Counter(after["sessions"]["closed"]) - Counter(before["sessions"]["closed"])
    assert closed == {"moved": moved, "length": 1}
    there = [sum(counted(status, "loaded_tokens") + counted(status, "cached_tokens")) for status in (before, after)]
    assert there[1] - there[0] >= len(asked), "the other replica does not compute the prompt again"
    assert sum(counted(after, "blocks_written")) > sum(counted(before, "blocks_written"))


async def test_one_is_killed_in_the_middle_of_an_answer_and_the_other_goes_on(
    mixed: Cluster, reference: dict[str, list[int]]
) -> None:
    asked, _ = questions()["recovery-long"]
    before = await asyncio.to_thread(mixed.settled)
    processes = await asyncio.to_thread(pids, mixed)
    killed, told = "", list[int]()
    async for choice in streamed(mixed, asked, LONG_ANSWER_TOKENS):
        told += choice["token_ids"] or []
        if len(told) >= 5 and not killed:
            (promise,) = (await asyncio.to_thread(mixed.status))["promises"]
            killed = promise["decode"]
            os.kill(processes[killed], signal.SIGKILL)
    assert told == reference["recovery-long"]
    after = await asyncio.to_thread(mixed.settled)
    assert Counter(after["sessions"]["closed"]) - Counter(before["sessions"]["closed"]) == {"lost": 1, "length": 1}
    (other,) = before["replicas"].keys() - {killed}
    generated = [status["replicas"][other]["counters"]["generated_tokens"] for status in (before, after)]
    assert generated[1] > generated[0]
    assert not mixed.used_blocks()


def phases(cluster: Cluster) -> dict[str, str]:
    """Of the pool's replicas."""
    return {name: each["phase"] for name, each in cluster.status()["pools"][POOL]["replicas"].items()}


async def asked_of(cluster: Cluster, client: httpx.AsyncClient, replica: str, other: str) -> list[list[int]]:
    """Prompts that only `replica` has computed, two with each of some beginnings."""
    headers = {"x-baton-admin-key": ADMIN_KEY}
    beginnings = [prompt(next(SEEDS), SHARED) for _ in range(FAMILIES)]
    prompts = [[*beginning, *prompt(next(SEEDS), tail)] for beginning in beginnings for tail in TAILS]
    assert (await client.post(f"/baton/replicas/{other}/drain", headers=headers)).status_code == 200
    await until(lambda: phases(cluster)[other] == "draining", BACK_WITHIN_S, "the other one takes nothing")
    for each in prompts:
        await tokens(client, each, 8)
    assert (await client.post(f"/baton/replicas/{other}/resume", headers=headers)).status_code == 200
    await until(lambda: phases(cluster)[other] == "ready", BACK_WITHIN_S, f"{replica} is not alone any more")
    return prompts


async def test_a_replica_that_serve_stops_hands_on_what_its_prompts_share(mixed: Cluster) -> None:
    """A scale-down. Whichever of the two goes, the other one has all of it then, and computes as one plain engine."""
    await until(lambda: list(phases(mixed).values()) == ["ready"] * 2, BACK_WITHIN_S, "both are up")
    one, two = phases(mixed)
    async with client_of(mixed) as client:
        asked = {each: await asked_of(mixed, client, each, other) for each, other in ((one, two), (two, one))}
        before = await asyncio.to_thread(mixed.settled)

        def scale(application: dict[str, Any]) -> None:
            application["deployments"] = [{"name": POOL, "num_replicas": 1}]

        await asyncio.to_thread(mixed.deploy, scale)
        await until(
            lambda: len(mixed.running().get(POOL, ())) == len(phases(mixed)) == 1, BACK_WITHIN_S, "one has gone"
        )
        after = await asyncio.to_thread(mixed.settled)
        (stays,) = after["replicas"]
        (gone,) = asked.keys() - {stays}
        fetched = [status["replicas"][stays]["counters"]["blocks_fetched"] for status in (before, after)]
        assert fetched[1] - fetched[0] == FAMILIES * SHARED // 128
        for each in asked[gone]:
            body = {"model": MODEL, "prompt": each, "max_tokens": 8}
            explained = await client.post("/baton/explain", json=body)
            assert explained.json()["decision"]["cached_tokens"] == SHARED
            answer = await tokens(client, each, 8)
            whole = await complete(client, each, 8, prompt_logprobs=0)
            assert answer == whole.json()["choices"][0]["token_ids"]
