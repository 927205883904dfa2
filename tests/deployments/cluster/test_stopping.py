"""An ingress, a replica or a session manager that is being stopped, with sessions open."""

from __future__ import annotations

import asyncio

import pytest

from deployments.errors import Unavailable
from deployments.manager.calls import Open, Status
from deployments.messages import MANAGER_RETIRES, Admit, Reject
from deployments.replica.drain import drain
from deployments.replica.timings import Timings as ReplicaTimings
from load_tests.harness.control_plane import LARGE, SMALL, InProcess, config, until
from tests.deployments.asked import intercept
from tests.deployments.cluster.asking import LENGTH, ONE_SEAT, Launch, assert_failed, prompt


@pytest.mark.slow
async def test_a_draining_replica_gets_nothing_new_and_what_outlives_its_time_goes_on_elsewhere(
    cluster: InProcess,
) -> None:
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=400)).has(3)
    leaving = (await cluster.placed(answer))["decode"]

    async def no() -> bool:
        return False

    draining = asyncio.create_task(drain(cluster.replicas[leaving], 0.4, no, ReplicaTimings(look_s=0.002)))

    async def is_known() -> bool:
        replicas = (await cluster.manager.ask(Status()))["replicas"]
        return bool(replicas[leaving]["phase"] == "draining")

    await until(is_known)
    others = [await cluster.ask(prompt(9), max_tokens=4) for _ in range(6)]
    for other in others:
        await other.over()
    await answer.over()
    await draining
    assert answer.context.error is None
    assert answer.tokens == await cluster.local(asked, max_tokens=400)
    placed = [task.session_id for pool in cluster.pools.values() for task in pool.tasks if task.replica_id == leaving]
    assert placed == [answer.request_id] * 2, "its answer, and what it hands over of it"
    assert cluster.replicas[leaving].open_runs == 0
    await cluster.settle(dead=[leaving])
    assert cluster.engines[leaving].used_blocks == 0


async def test_a_session_asks_the_next_manager_when_one_leaves(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, original = list[str](), cluster.manager.ask

    async def leaving(call: Open) -> Admit | Reject:
        if len(refused) < 2:
            refused.append(call.request.session_id)
            return Reject("ask again", 0.01, unavailable=True, code=MANAGER_RETIRES)
        return await original(call)

    intercept(monkeypatch, cluster.manager, Open, leaving)
    answer = await cluster.answer(prompt(20), max_tokens=4)
    assert refused == [answer.request_id] * 2
    assert answer.reason is LENGTH
    await cluster.settle()


async def test_an_ingress_whose_time_is_over_ends_its_sessions_with_an_error(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=400)).has(3)
    cluster.core.end_all(Unavailable("this server is being stopped"))
    await answer.over()
    assert_failed(answer, Unavailable)
    await cluster.settle()


async def test_where_all_leave_no_session_waits_for_a_place_and_what_runs_goes_on(launch: Launch) -> None:
    cluster = await launch(config(ONE_SEAT))
    asked = [prompt(8 + number) for number in range(4)]
    whole = [await cluster.local(each, max_tokens=60) for each in asked[:2]]
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    run = [await cluster.ask(each, max_tokens=60) for each in asked[:2]]
    for answer in run:
        await cluster.placed(answer)
    waits = await cluster.ask(asked[2], max_tokens=5)
    await cluster.queued(1)
    cluster.core.refuse(Unavailable("this server is being stopped"))
    late = await cluster.ask(asked[3], max_tokens=5)
    for answer in (waits, late):
        await answer.over()
        assert_failed(answer, Unavailable)
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    for answer in run:
        await answer.over()
    assert [answer.tokens for answer in run] == whole
    await cluster.settle()


async def test_an_answer_that_loses_its_replica_where_all_leave_ends_at_once(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=400)).has(3)
    owner = (await cluster.placed(answer))["decode"]
    cluster.core.refuse(Unavailable("this server is being stopped"))
    await cluster.kill(owner)
    await answer.over()
    assert_failed(answer, Unavailable)
    await cluster.settle(dead=[owner])


async def test_the_ingress_shuts_down_with_sessions_open(launch: Launch) -> None:
    """The replicas hear of it and give everything back."""
    cluster = await launch(config())
    answers = [await cluster.ask(prompt(8), max_tokens=400) for _ in range(3)]
    for answer in answers:
        await answer.has(2)
    cluster.core.shutdown()
    await cluster.settle()


async def test_the_ingress_dies_with_sessions_open(launch: Launch) -> None:
    """Neither the replicas nor the manager are told anything."""
    cluster = await launch(config(ingress_lease_s=2.0))
    answers = [await cluster.ask(prompt(8), max_tokens=400) for _ in range(3)]
    for answer in answers:
        await answer.has(2)
    cluster.end_ingress()
    await cluster.settle()
    assert (await cluster.manager.ask(Status()))["sessions"]["closed"] == {"orphaned": 3}
