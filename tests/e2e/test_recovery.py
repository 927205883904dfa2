"""A replica's process is killed in the middle of an answer: the client sees a pause, and the same answer."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.e2e.client import body, client_of, complete, events, tokens, until
from tests.e2e.cluster import Cluster, processes
from tests.e2e.conftest import ANSWER_TOKENS, LONG_ANSWER_TOKENS, questions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BACK_WITHIN_S = 240.0
SOON_S = 30.0


def kill(cluster: Cluster, pool: str) -> str:
    """Kill the process of a pool's only replica; its replica id."""
    (replica_id,) = [name for name, each in cluster.status()["replicas"].items() if each["pool"] == pool]
    (pid,) = [
        pid for pid, line in processes(cluster.marker).items() if line.startswith(f"ray::ServeReplica:baton:{pool}")
    ]
    os.kill(pid, signal.SIGKILL)
    return replica_id


async def is_back(cluster: Cluster, pool: str, without: str) -> float:
    """Serve has put another replica in its place, and everything is free."""

    def whole() -> bool:
        status = cluster.status()
        ready = {name for name, each in status["pools"][pool]["replicas"].items() if each["fresh"] and each["load"]}
        return bool(ready - {without}) and status["ready"]

    took_s = await until(whole, BACK_WITHIN_S, f"{pool} has a replica again")
    await asyncio.to_thread(cluster.settled)
    assert not cluster.used_blocks()
    return took_s


def prefilling(cluster: Cluster) -> list[dict[str, object]]:
    return [promise for promise in cluster.status()["promises"] if promise["prefilling"]]


async def test_prefill_is_killed_in_flight_and_nobody_waits_for_its_restart(
    baton: Cluster, reference: dict[str, list[int]]
) -> None:
    asked, _ = questions()["length-1800"]
    async with client_of(baton) as client:
        answer = asyncio.create_task(complete(client, asked, ANSWER_TOKENS))
        await until(lambda: bool(prefilling(baton)), SOON_S, "it is being prefilled")
        lost = kill(baton, "prefill")
        response = await answer
        after = await complete(client, questions()["length-1000"][0], ANSWER_TOKENS)
    assert response.json()["choices"][0]["token_ids"] == reference["length-1800"]
    assert response.headers["x-baton-mode"] == "decode_local,disaggregated"
    assert after.json()["choices"][0]["token_ids"] == reference["length-1000"]
    assert after.headers["x-baton-mode"] == "decode_local", "the prefill replica was not back yet"
    await is_back(baton, "prefill", without=lost)
    async with client_of(baton) as client:
        again = await complete(client, questions()["length-500"][0], ANSWER_TOKENS)
    assert again.json()["choices"][0]["token_ids"] == reference["length-500"]
    assert again.headers["x-baton-mode"] == "disaggregated"


async def test_decode_is_killed_in_the_middle_of_a_stream_and_the_answer_is_whole(
    baton: Cluster, reference: dict[str, list[int]]
) -> None:
    asked, _ = questions()["long-answer"]
    streamed: list[int] = []
    finish: list[str] = []
    lost = pool = ""
    async with (
        client_of(baton) as client,
        client.stream("POST", "/v1/completions", json=body(asked, LONG_ANSWER_TOKENS, stream=True)) as response,
    ):
        async for event in events(response):
            (choice,) = event["choices"]
            streamed += choice["token_ids"] or []
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            if len(streamed) >= 5 and not lost:
                (promise,) = baton.status()["promises"]
                pool = baton.status()["replicas"][promise["decode"]]["pool"]
                lost = await asyncio.to_thread(kill, baton, pool)
    assert streamed == reference["long-answer"]
    assert finish == ["length"]
    assert baton.status()["sessions"]["closed"]["lost"] >= 1
    async with client_of(baton) as client:
        assert await tokens(client, questions()["length-257"][0], ANSWER_TOKENS) == reference["length-257"]
    await is_back(baton, pool, without=lost)


def test_the_killed_left_no_process(baton: Cluster) -> None:
    """Three engines run again, as at the start."""
    baton.settled()
    engines = [line for line in processes(baton.marker).values() if line.startswith("VLLM::EngineCore")]
    assert len(engines) == 3
