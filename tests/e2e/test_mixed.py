"""Two replicas of one mixed pool: each prefills and decodes, and either goes on with what the other one has lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from app.launch.serve_api import ServeApi
from tests.e2e.client import client_of, complete, streamed, tokens
from tests.e2e.cluster import NAME, PATIENCE_S, Cluster, started
from tests.e2e.conftest import CROWD, LONG_ANSWER_TOKENS, prompt, questions

pytestmark = [pytest.mark.engine, pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]

POOL = "mixed-main"
COMPARED = [*(f"crowd-{i}" for i in range(CROWD)), "length-600", "length-1800", "recovery-700", "recovery-1500"]
OTHERS = [(300, 48), (700, 48), (1100, 24), (1500, 24)]
"""Prompt and answer tokens of requests beside them, of which no prompt was there before."""
SEEDS = itertools.count(80_000)
ROUNDS = 6


@pytest.fixture(scope="module")
def mixed(reference: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """configs/cpu-mixed.yaml, running. The plain engine's process has ended before."""
    with started("cpu-mixed.yaml", tmp_path_factory.mktemp("mixed")) as cluster:
        yield cluster


def kill(cluster: Cluster, replica_id: str) -> None:
    details = ServeApi(cluster.dashboard_url).details_within(PATIENCE_S)
    replicas = details["applications"][NAME]["deployments"][POOL]["replicas"]
    (pid,) = [replica["pid"] for replica in replicas if replica["replica_id"] == replica_id]
    os.kill(pid, signal.SIGKILL)


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
    """Most answers are written where their prompt is computed, and some end on the other replica, as load decides."""
    for _ in range(ROUNDS):
        await ask_at_once(mixed, reference)
        after = await asyncio.to_thread(mixed.settled)
        if after["modes"].get("disaggregated"):
            break
    assert after["modes"]["decode_local"] > 0
    assert after["modes"]["disaggregated"] > 0
    assert sum(counted(after, "loaded_tokens")) > 0, "KV went from one to the other"
    for counter in ("computed_tokens", "generated_tokens"):
        assert min(counted(after, counter)) > 0, counter
    assert sum(counted(after, "preemptions")) == 0


async def test_one_is_killed_in_the_middle_of_an_answer_and_the_other_goes_on(
    mixed: Cluster, reference: dict[str, list[int]]
) -> None:
    asked, _ = questions()["recovery-long"]
    before = await asyncio.to_thread(mixed.settled)
    killed, told = "", list[int]()
    async for choice in streamed(mixed, asked, LONG_ANSWER_TOKENS):
        told += choice["token_ids"] or []
        if len(told) >= 5 and not killed:
            (promise,) = (await asyncio.to_thread(mixed.status))["promises"]
            killed = promise["decode"]
            await asyncio.to_thread(kill, mixed, killed)
    assert told == reference["recovery-long"]
    after = await asyncio.to_thread(mixed.settled)
    assert Counter(after["sessions"]["closed"]) - Counter(before["sessions"]["closed"]) == {"lost": 1, "length": 1}
    (other,) = before["replicas"].keys() - {killed}
    generated = [status["replicas"][other]["counters"]["generated_tokens"] for status in (before, after)]
    assert generated[1] > generated[0]
    assert not mixed.used_blocks()
