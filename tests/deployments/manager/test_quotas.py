"""Limits of API keys over the manager's calls: exact over several ingresses, and nothing is left of a session."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployments.manager.calls import Close, Open, Report, Status, Withdraw
from deployments.messages import Admit, Allowance, Finished, Phase, Quota, Reject, ReplicaSnapshot, SessionRequest
from deployments.policy.admission.quotas import TOKENS
from tests.deployments.manager.test_manager import BLOCK, D0, Cluster, ask, settle

KEY = Quota("a", requests=30, tokens=2000, answers=1)


def limited(session_id: str, blocks: int = 2, quota: Quota = KEY) -> SessionRequest:
    return replace(ask(session_id, blocks), quota=quota)


async def keys(cluster: Cluster) -> dict[str, Any]:
    shown: dict[str, Any] = (await cluster.manager.ask(Status()))["keys"]
    return shown


@pytest.fixture
async def cluster() -> Cluster:
    cluster = Cluster()
    await cluster.up()
    return cluster


async def test_a_close_gives_back_what_was_not_used(cluster: Cluster) -> None:
    answer = await cluster.manager.ask(Open(limited("a")))
    assert isinstance(answer, Admit)
    assert answer.allowance == Allowance(29, 61.0, 2000 - 2 * BLOCK, 61.0)
    assert await keys(cluster) == {"a": {"requests": 1, "tokens": 2 * BLOCK}}
    await cluster.manager.ask(Close("a", answer.placement.epoch, "stop", 3))
    assert await keys(cluster) == {"a": {"requests": 1, "tokens": BLOCK + 3}}


async def test_a_refusal_by_the_limit_is_counted_by_its_code(cluster: Cluster) -> None:
    few = replace(KEY, tokens=2 * BLOCK)
    assert isinstance(await cluster.manager.ask(Open(limited("a", quota=few))), Admit)
    refusal = await cluster.manager.ask(Open(limited("b", quota=few)))
    assert isinstance(refusal, Reject)
    assert (refusal.code, refusal.retry_after_s) == (TOKENS, 61.0)
    assert (await cluster.manager.ask(Status()))["rejects"] == {TOKENS: 1}


async def test_what_waits_is_counted_until_it_goes(cluster: Cluster) -> None:
    first = await cluster.manager.ask(Open(limited("first", 20)))
    assert isinstance(first, Admit)
    waiting = asyncio.create_task(cluster.manager.ask(Open(limited("waiting", 20))))
    await settle()
    assert (await keys(cluster))["a"] == {"requests": 2, "tokens": 40 * BLOCK}
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (await keys(cluster))["a"] == {"requests": 1, "tokens": 20 * BLOCK}
    await cluster.manager.ask(Withdraw("first", "cancelled"))
    assert (await keys(cluster))["a"] == {"requests": 0, "tokens": 0}


async def test_a_queue_timeout_is_not_counted(cluster: Cluster) -> None:
    assert isinstance(await cluster.manager.ask(Open(limited("first", 20))), Admit)
    waiting = asyncio.create_task(cluster.manager.ask(Open(limited("waiting", 20))))
    await settle()
    cluster.clock.now_s = 31.0
    await cluster.up()
    refusal = await asyncio.wait_for(waiting, 60)
    assert isinstance(refusal, Reject)
    assert refusal.allowance == Allowance(29, 30.0, 2000 - 20 * BLOCK, 30.0), "as if it had not asked"
    assert (await keys(cluster))["a"]["requests"] == 1


async def test_an_orphaned_session_gives_back_what_it_did_not_use(cluster: Cluster) -> None:
    answer = await cluster.manager.ask(Open(limited("a")))
    assert isinstance(answer, Admit)
    over = (Finished("a", answer.placement.epoch, 2, orphaned=True),)
    await cluster.manager.ask(Report(ReplicaSnapshot("d0", 99, Phase.READY, D0, finished=over, finished_version=1)))
    assert (await keys(cluster))["a"] == {"requests": 1, "tokens": BLOCK + 2}
