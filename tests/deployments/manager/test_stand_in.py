"""The session manager dies and comes back: answers go on, new ones are placed meanwhile, and the ledger is exact."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from deployments.errors import Unavailable
from deployments.manager.calls import Call, Close, Lost, Open, PrefillDone, Ready, Status, View
from deployments.manager.timings import Timings
from deployments.messages import ManagerView
from load_tests.harness.control_plane import PREFILL, REPLICAS, SMALL, Answer, InProcess, config, in_process, until
from tests.deployments.asked import intercept

LENGTH = FinishReason.LENGTH
QUICK = Timings(view_every_s=0.02, again_s=0.02, view_late_s=10.0)
"""A view comes every moment, and on a busy machine it may be late."""
_random = random.Random(11)


def prompt(tokens: int) -> list[int]:
    return [_random.randint(100, 40_000) for _ in range(tokens)]


@pytest.fixture
async def cluster(no_leaks: None, request: pytest.FixtureRequest) -> AsyncIterator[InProcess]:
    """A cluster whose ingress has a view. A parameter: what its configuration is made with, and its replicas."""
    parameter: tuple[dict[str, Any], tuple[str, ...]] = getattr(request, "param", ({}, tuple(REPLICAS)))
    options, replica_ids = dict(parameter[0]), parameter[1]
    ingresses, timings = options.pop("ingresses", 1), options.pop("timings", QUICK)
    made = config(**options)
    made = made.model_copy(update={"ingress": made.ingress.model_copy(update={"replicas": ingresses})})
    async with in_process(made, replica_ids, manager_timings=timings) as cluster:
        await viewed(cluster, len(replica_ids))
        yield cluster

    async def alone() -> bool:
        return asyncio.all_tasks() == {asyncio.current_task()}

    await until(alone)


async def viewed(cluster: InProcess, replicas: int) -> None:
    """Wait until the ingress knows so many replicas."""

    async def look() -> bool:
        return len(cluster.stand_in._view.replicas) == replicas

    await until(look)


async def away(cluster: InProcess) -> None:
    """The manager dies, and the ingress has noticed."""
    cluster.lose_manager()

    async def look() -> bool:
        return cluster.stand_in._is_away

    await until(look)


async def back(cluster: InProcess) -> None:
    """There is another manager, and the ingress has noticed."""
    cluster.restart_manager()

    async def look() -> bool:
        return not cluster.stand_in._is_away

    await until(look)


async def reserved(cluster: InProcess) -> dict[str, int]:
    """Blocks that the manager holds for promised, by replica, as soon as it knows them all."""

    async def look() -> bool:
        return await cluster._are_ready(tuple(cluster.replicas))

    await until(look)
    pools = (await cluster.manager.ask(Ready()))["pools"].values()
    loads = {name: each["load"] for pool in pools for name, each in pool["replicas"].items()}
    return {name: load["total_blocks"] - load["free_blocks"] for name, load in loads.items()}


def by_tasks(cluster: InProcess, open_now: list[Answer]) -> dict[str, int]:
    """Blocks that the decode parts of these sessions were promised, by replica."""
    found = dict.fromkeys(cluster.replicas, 0)
    ids = {answer.request_id for answer in open_now}
    for pool, port in cluster.pools.items():
        for task in port.tasks if pool != "prefill" else []:
            found[task.replica_id] += task.reservation.blocks if task.session_id in ids else 0
    return found


def halt(cluster: InProcess, *replica_ids: str) -> None:
    for replica_id in replica_ids:
        cluster.engines[replica_id].go.clear()


def hasten(cluster: InProcess) -> None:
    """Steps were long for what had to happen within an answer; now it may end."""
    for engine in cluster.engines.values():
        engine._config = engine._config.model_copy(update={"step_s": 0.001})


def go_on(cluster: InProcess) -> None:
    for engine in cluster.engines.values():
        engine.go.set()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [({"engine": {"step_s": 0.03}}, tuple(REPLICAS))], indirect=True)
async def test_answers_go_on_and_new_ones_are_placed_and_the_ledger_is_exact_again(
    cluster: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [prompt(20 + n) for n in range(4)]
    before = [await (await cluster.ask(each, max_tokens=240)).has(3) for each in prompts[:2]]
    with caplog.at_level(logging.WARNING, "baton.stand_in"):
        await away(cluster)
        meanwhile = [await (await cluster.ask(each, max_tokens=240)).has(3) for each in prompts[2:]]
    assert [record.message.split(" (")[0] for record in caplog.records] == ["the session manager is away"]
    assert cluster.stand_in.counters == {"absences": 1, "placed": 2}
    await back(cluster)

    counted = await reserved(cluster)
    assert counted == {**by_tasks(cluster, before + meanwhile), PREFILL: 0}, "exact as soon as it places"
    assert not (await cluster.manager.ask(Status()))["promises"]
    assert not [answer for answer in before + meanwhile if answer.reason is not None], "it ended too early"
    hasten(cluster)
    for asked, answer in zip(prompts, before + meanwhile, strict=True):
        await answer.over()
        assert answer.tokens == await cluster.local(asked, max_tokens=240)
    await cluster.settle()
    assert cluster.stand_in.counters == {"absences": 1, "placed": 2}, "the rest was placed by the manager"
    assert not cluster.stand_in._own


async def test_what_ends_meanwhile_makes_room(cluster: InProcess) -> None:
    """The view is frozen, but the ingress knows its own sessions: one after the other fills the whole cluster."""
    first = await (await cluster.ask(prompt(440), max_tokens=40)).has(3)
    await away(cluster)
    await first.over()
    for _ in range(4):
        assert (await cluster.answer(prompt(440), max_tokens=40)).reason is LENGTH
    await back(cluster)
    await cluster.settle()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [({"engine": {"step_s": 0.03}}, (*REPLICAS, "decode-large-1"))], indirect=True)
async def test_epochs_of_a_session_rise_whoever_places_it(cluster: InProcess) -> None:
    """By the manager, by the stand-in after a death, and by a manager that has forgotten everything."""
    asked = prompt(20)
    answer = await (await cluster.ask(asked, max_tokens=300)).has(3)
    await away(cluster)
    await bury_owner(cluster, answer)
    await back(cluster)
    await reserved(cluster)
    await bury_owner(cluster, answer)
    hasten(cluster)
    await answer.over()
    epochs = [epoch for epoch, _ in _of_session(cluster, answer)]
    assert len(epochs) == 3
    assert epochs == sorted(set(epochs))
    assert cluster.stand_in.counters == {"absences": 1, "placed": 1}
    assert answer.tokens == await cluster.local(asked, max_tokens=300)
    await cluster.settle()


async def bury_owner(cluster: InProcess, answer: Answer) -> None:
    """The replica that decodes an answer dies, and the answer goes on."""
    _, owner = _of_session(cluster, answer)[-1]
    await cluster.kill(owner)
    await cluster.bury(owner)
    await answer.has(len(answer.tokens) + 3)


def _of_session(cluster: InProcess, answer: Answer) -> list[tuple[int, str]]:
    """Epoch and replica of each decode part of a session, by epoch."""
    tasks = (task for pool, port in cluster.pools.items() if pool != "prefill" for task in port.tasks)
    return sorted((task.epoch, task.replica_id) for task in tasks if task.session_id == answer.request_id)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [({"timings": replace(QUICK, view_late_s=2.0)}, (PREFILL, SMALL))], indirect=True)
async def test_a_request_goes_on_waiting_where_sessions_are_placed(cluster: InProcess) -> None:
    """In the manager's room when it dies, in the stand-in's when it comes back; no request is refused."""
    halt(cluster, SMALL)
    holder = await (await cluster.ask(prompt(100), max_tokens=400)).has(1)
    waiting = await cluster.ask(prompt(100), max_tokens=400)
    await cluster.queued(1)
    await away(cluster)

    async def waits() -> bool:
        return bool((await cluster.stand_in._acting.ask(Status()))["sessions"]["queued"] == 1)

    await until(waits)
    await back(cluster)
    await cluster.queued(1)
    go_on(cluster)
    assert [(await answer.over()).reason for answer in (holder, waiting)] == [LENGTH, LENGTH]
    assert cluster.stand_in.counters["placed"] == 0
    await cluster.settle()


@pytest.mark.parametrize(
    ("cluster", "room"),
    [(({"ingresses": n}, (PREFILL, SMALL)), 144 // 9 // n) for n in (1, 2, 3)],
    indirect=["cluster"],
)
async def test_each_of_several_ingresses_fills_its_share_only(cluster: InProcess, room: int) -> None:
    """They do not hear of each other."""
    await away(cluster)
    halt(cluster, SMALL)
    answers = [await cluster.ask(prompt(8), max_tokens=28) for _ in range(room + 2)]

    async def waits() -> bool:
        return bool((await cluster.stand_in._acting.ask(Status()))["sessions"]["queued"] == 2)

    await until(waits)
    assert cluster.stand_in.counters["placed"] == room
    go_on(cluster)
    for answer in answers:
        assert (await answer.over()).reason is LENGTH
    await back(cluster)
    await cluster.settle()


async def test_an_old_view_is_not_placed_by(cluster: InProcess) -> None:
    await away(cluster)
    assert (await cluster.stand_in.ask(Ready()))["ready"]
    assert (await cluster.stand_in.ask(Ready()))["manager"] == "away"
    cluster.stand_in._viewed_s -= QUICK.view_oldest_s
    answer = await cluster.answer(prompt(8), max_tokens=5)
    assert type(answer.context.error) is Unavailable
    assert answer.context.error.retry_after_s
    with pytest.raises(Unavailable):
        await cluster.stand_in.ask(Ready())
    await back(cluster)
    assert (await cluster.answer(prompt(8), max_tokens=5)).reason is LENGTH
    assert "manager" not in await cluster.stand_in.ask(Ready())
    await cluster.settle()


async def test_a_manager_that_only_hangs_is_told_later_what_it_missed(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await (await cluster.ask(prompt(20), max_tokens=60)).has(3)
    hangs = asyncio.Event()

    really = cluster.manager.ask

    async def hang(call: Call[Any]) -> Any:
        await hangs.wait()
        return await really(call)

    intercept(monkeypatch, cluster.manager, Open | Close | PrefillDone | View, hang)
    monkeypatch.setattr(cluster.stand_in, "_timings", replace(QUICK, view_late_s=0.1))
    assert (await cluster.answer(prompt(20), max_tokens=60)).reason is LENGTH
    await held.over()
    assert cluster.stand_in.counters == {"absences": 1, "placed": 1}
    assert (await cluster.manager.ask(Status()))["sessions"]["open"] == 1
    hangs.set()
    await cluster.settle()
    assert (await cluster.manager.ask(Status()))["sessions"]["closed"] == {"length": 1}
    assert not cluster.stand_in._untold


async def test_views_are_of_those_that_can_be_placed_on_and_of_what_they_hold(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=60)).has(3)
    placed = await cluster.placed(answer)
    view: ManagerView = await cluster.manager.ask(View())
    held = {replica.info.replica_id: replica.held.blocks for replica in view.replicas}
    assert held.keys() == set(REPLICAS)
    assert held[placed["decode"]] == placed["reserved_blocks"] == 20
    await cluster.manager.ask(Lost(placed["decode"]))
    view = await cluster.manager.ask(View())
    assert {replica.info.replica_id for replica in view.replicas} == set(REPLICAS) - {placed["decode"]}
    await answer.over()
    await cluster.settle()
