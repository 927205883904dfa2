"""A replica's process is killed in the middle of an answer: the client sees a pause, and the same answer."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.e2e.adapters import NAMES
from tests.e2e.client import client_of, complete, streamed, until
from tests.e2e.cluster import Cluster, engines
from tests.e2e.conftest import ANSWER_TOKENS, LONG_ANSWER_TOKENS, questions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BACK_WITHIN_S = 240.0
SOON_S = 60.0
KILLED = set[str]()


def kill(cluster: Cluster, replica_id: str) -> None:
    """Kill a replica's process; its pool has no other."""
    pool = cluster.status()["replicas"][replica_id]["pool"]
    KILLED.add(replica_id)
    cluster.kill(pool)


def is_whole(cluster: Cluster) -> bool:
    """Whether every pool has a replica that lives."""
    status = cluster.status()
    pools = status["pools"].values()
    ready = [name for pool in pools for name, each in pool["replicas"].items() if each["fresh"] and each["load"]]
    return bool(status["ready"]) and len(set(ready) - KILLED) == 3


async def test_decode_is_killed_in_the_middle_of_a_stream_and_the_answer_is_whole(
    baton: Cluster, reference: dict[str, list[int]]
) -> None:
    asked, _ = questions()["recovery-long"]
    tokens: list[int] = []
    finish: list[str] = []
    async for choice in streamed(baton, asked, LONG_ANSWER_TOKENS):
        tokens += choice["token_ids"] or []
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
        if len(tokens) >= 5 and not KILLED:
            (promise,) = (await asyncio.to_thread(baton.status))["promises"]
            assert promise["mode"] == "disaggregated"
            await asyncio.to_thread(kill, baton, promise["decode"])
    assert tokens == reference["recovery-long"]
    assert finish == ["length"]
    assert baton.status()["sessions"]["closed"]["lost"] == 1


async def test_prefill_is_killed_in_flight_and_no_request_waits_for_its_restart(
    baton: Cluster, reference: dict[str, list[int]]
) -> None:
    asked, _ = questions()["recovery-1500"]  # only the larger pool holds it
    await until(lambda: is_whole(baton), BACK_WITHIN_S, "what was killed before is back")
    (replica,) = [name for name, each in baton.status()["replicas"].items() if each["role"] == "prefill"]
    pid = baton.pid("prefill")

    def is_prefilling() -> bool:
        return any(promise["prefilling"] for promise in baton.status()["promises"])

    async with client_of(baton) as client:
        answer = asyncio.create_task(complete(client, asked, ANSWER_TOKENS))
        await until(is_prefilling, SOON_S, "it is being prefilled")
        KILLED.add(replica)
        os.kill(pid, signal.SIGKILL)
        response = await answer
        after = await complete(client, questions()["recovery-700"][0], ANSWER_TOKENS)
    assert response.json()["choices"][0]["token_ids"] == reference["recovery-1500"]
    assert response.headers["x-baton-mode"] == "decode_local,disaggregated"
    assert after.json()["choices"][0]["token_ids"] == reference["recovery-700"]
    assert after.headers["x-baton-mode"] == "decode_local", "the prefill replica was not back yet"


async def test_the_killed_are_replaced_and_nothing_of_them_is_left(
    baton: Cluster, reference: dict[str, list[int]]
) -> None:
    await until(lambda: is_whole(baton), BACK_WITHIN_S, "every pool has a living replica")
    async with client_of(baton) as client:
        again = await complete(client, questions()["recovery-200"][0], ANSWER_TOKENS)
    assert again.json()["choices"][0]["token_ids"] == reference["recovery-200"]
    assert again.headers["x-baton-mode"] == "disaggregated"
    async with client_of(baton) as client:
        tuned = await complete(client, questions()["tuned-129"][0], ANSWER_TOKENS, model=NAMES[0])
    assert tuned.json()["choices"][0]["token_ids"] == reference[f"{NAMES[0]} tuned-129"], "it is loaded again"
    await asyncio.to_thread(baton.settled)
    assert not baton.used_blocks()
    await until(lambda: len(engines(baton)) == 3, SOON_S, "each replica has an engine, and there are no others")
