"""How often and how long a session is tried before its client gets an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from deployments.cluster.recovery import Limits
from deployments.cluster.timings import Timings
from deployments.errors import ReplicaLost, SessionTimeout, Unavailable
from deployments.manager.calls import Open
from deployments.messages import Admit, Reject
from deployments.policy.admission.retry_budget import RETRY_BUDGET
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, InProcess, config, until
from tests.deployments.asked import intercept
from tests.deployments.cluster.asking import LENGTH, Launch, assert_failed, prompt


async def test_attempts_are_bounded(launch: Launch) -> None:
    cluster = await launch(config(max_attempts=3))
    for pool in cluster.pools.values():
        pool.tasks.clear()
        pool.error = ReplicaLost("there is no such replica")
    answer = cluster.ask(prompt(40), max_tokens=5)
    first = await answer

    async def reporting() -> bool:  # the manager hears that they are lost, and then from them again
        return first.reason is not None

    await until(reporting)
    assert_failed(first, ReplicaLost)
    assert str(first.context.error).endswith(", and so in each of 3 placements")
    epochs = {task.epoch for pool in cluster.pools.values() for task in pool.tasks}
    assert epochs == {1, 2, 3}
    for pool in cluster.pools.values():
        pool.error = None
    await cluster.settle()


async def test_a_placement_that_gave_tokens_begins_the_count_anew(launch: Launch) -> None:
    """Four decode replicas in a row die under one answer, of which two placements in a row may come to nothing."""
    cluster = await launch(config(max_attempts=2))
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=300)).has(3)
    for life in range(4):
        owner = (await cluster.placed(answer))["decode"]
        await cluster.kill(owner)
        await cluster.bury(owner)
        await cluster.start(f"{owner.rpartition('-')[0]}-life{life}")
        await answer.has(len(answer.tokens) + 3)
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=300)
    await cluster.settle()


async def test_placements_of_one_session_are_bounded(launch: Launch) -> None:
    cluster = await launch(config(), limits=Limits(placements=2))
    answer = await (await cluster.ask(prompt(20), max_tokens=300)).has(3)
    killed = []
    for _ in range(2):
        killed.append((await cluster.placed(answer))["decode"])
        await cluster.kill(killed[-1])
        if len(killed) < 2:
            await answer.has(len(answer.tokens) + 3)
    await answer.over()
    assert_failed(answer, ReplicaLost)
    assert str(answer.context.error).endswith(", the last of 2 placements")
    await cluster.settle(dead=killed)


async def test_a_lost_session_waits_for_the_retry_budget(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, original = list[int](), cluster.manager.ask

    async def without_budget(call: Open) -> Admit | Reject:
        if call.request.attempt > 1 and len(refused) < 3:
            refused.append(call.request.attempt)
            return Reject("no budget", 0.01, unavailable=True, code=RETRY_BUDGET)
        return await original(call)

    intercept(monkeypatch, cluster.manager, Open, without_budget)
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=200)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.over()
    assert refused == [2, 2, 2], "waiting for budget is no placement"
    assert answer.tokens == await cluster.local(asked, max_tokens=200)
    await cluster.settle(dead=[owner])


async def test_a_retry_budget_that_never_comes_ends_the_session(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await launch(config(), timings=Timings(budget_wait_s=0.05))
    original: Callable[[Open], Awaitable[Admit | Reject]] = cluster.manager.ask

    async def without_budget(call: Open) -> Admit | Reject:
        if call.request.attempt > 1:
            return Reject("no budget", 0.01, unavailable=True, code=RETRY_BUDGET)
        return await original(call)

    intercept(monkeypatch, cluster.manager, Open, without_budget)
    answer = await (await cluster.ask(prompt(20), max_tokens=200)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.over()
    assert_failed(answer, Unavailable)
    await cluster.settle(dead=[owner])


async def test_aborting_between_two_placements(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes while its session waits for its second place."""
    opened, original, gate = list[int](), cluster.manager.ask, asyncio.Event()

    async def slow(call: Open) -> Admit | Reject:
        opened.append(call.request.attempt)
        if call.request.attempt > 1:
            await gate.wait()
        return await original(call)

    intercept(monkeypatch, cluster.manager, Open, slow)
    answer = await (await cluster.ask(prompt(20), max_tokens=300)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)

    async def waits() -> bool:
        return opened == [1, 2]

    await until(waits)
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.closed()
    gate.set()
    await cluster.settle(dead=[owner])
    assert answer.reason is None


@pytest.mark.parametrize("where", [PREFILL, "decode"])
async def test_a_session_that_takes_too_long(launch: Launch, where: str) -> None:
    cluster = await launch(config(session_timeout_s=0.3 if where == PREFILL else 3.0))
    stuck = [PREFILL] if where == PREFILL else [SMALL, LARGE]
    for replica_id in stuck:
        cluster.engines[replica_id].go.clear()
    answer = await cluster.answer(prompt(40), max_tokens=5)
    assert_failed(answer, SessionTimeout)
    assert len(answer.tokens) == (where != PREFILL)
    await cluster.closed()
    for replica_id in stuck:
        cluster.engines[replica_id].go.set()
    await cluster.settle()


async def test_a_session_that_waits_too_long_for_its_place(launch: Launch) -> None:
    cluster = await launch(config(session_timeout_s=0.1), [])
    assert_failed(await cluster.answer(prompt(40), max_tokens=5), SessionTimeout)
    await cluster.settle()


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_outputs_that_never_arrive(launch: Launch, pool: str) -> None:
    cluster = await launch(config(max_attempts=1))
    lossy = [port for name, port in cluster.pools.items() if name.startswith(pool)]
    for port in lossy:
        port.loses_outputs = True
    answer = await cluster.answer(prompt(20), max_tokens=5)
    assert_failed(answer, ReplicaLost)
    assert str(answer.context.error) == f"the {pool} replica's last output did not arrive"
    assert len(answer.tokens) == (pool == "decode")
    for port in lossy:
        port.loses_outputs = False
    assert (await cluster.answer(prompt(20), max_tokens=5)).reason is LENGTH
    await cluster.settle()
