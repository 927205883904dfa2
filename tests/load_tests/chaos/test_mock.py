"""Random faults under a crowd: every answer is whole and right, or ends with an error; nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from configs.schema import BatonConfig
from deployments.messages import SessionTask
from load_tests.chaos.crowd import Crowd, Question, questions
from load_tests.chaos.faults import KINDS, OFTEN, Faults
from load_tests.chaos.messages import MESSAGE_FAULTS, disturbed
from load_tests.harness.control_plane import LARGE, PREFILL, REPLICAS, SMALL, InProcess, config, in_process, until

QUESTIONS, CLIENTS, FAULTS = 30, 24, 40
HANDOFF_S = 0.5


@pytest.fixture
async def cluster(no_leaks: None) -> AsyncIterator[InProcess]:
    async with running(config(max_attempts=8, queue_timeout_s=20.0)) as made:
        yield made


@pytest.fixture
async def hasty(no_leaks: None) -> AsyncIterator[InProcess]:
    """A KV cache that does not come is missed after `HANDOFF_S`."""
    settings = config(max_attempts=8, queue_timeout_s=20.0)
    channel = settings.channel.model_copy(update={"handoff_timeout_s": HANDOFF_S})
    async with running(settings.model_copy(update={"channel": channel})) as made:
        yield made


@contextlib.asynccontextmanager
async def running(settings: BatonConfig) -> AsyncIterator[InProcess]:
    async with in_process(settings) as made:
        yield made

    async def alone() -> bool:
        return asyncio.all_tasks() == {asyncio.current_task()}

    await until(alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_answers_are_right_with_every_kind_of_fault(hasty: InProcess, seed: int) -> None:
    asked = await questions(hasty, random.Random(seed), QUESTIONS)
    crowd = Crowd(hasty, asked, random.Random(100 + seed))
    faults = Faults(hasty, random.Random(200 + seed), 0.05, (*OFTEN, "manager"))
    disturbing = asyncio.create_task(faults.run(FAULTS, streams=2))
    await crowd.run(CLIENTS, disturbing.done)
    await disturbing
    await hasty.settle()
    assert len(faults.counts) >= len(OFTEN) - 2
    assert len(faults.points) >= 5
    verdicts = Counter(each.verdict() for each in crowd.asked)
    assert verdicts.keys() <= {"whole", "left", "refused", "failed"}, verdicts
    assert verdicts["failed"] <= 0.02 * len(crowd.asked), (verdicts, crowd.why_failed())


async def test_the_pause_at_a_death_is_measured(cluster: InProcess) -> None:
    asked = await long_question(cluster)
    answer = await (await cluster.ask(asked.prompt, max_tokens=asked.max_tokens)).has(2)
    (owner,) = [task.replica_id for task in tasks_of(cluster, answer.request_id) if "decode" in task.replica_id]
    faults = Faults(cluster, random.Random(1), 0.0)
    await faults._kill(owner)
    await answer.over()
    assert answer.tokens == asked.whole
    (pause_s,) = faults.pauses_s()
    assert 0 < pause_s <= answer.times_s[-1] - answer.times_s[0]
    await cluster.settle()


async def test_who_waits_for_blocks_has_them_once_they_are_back(cluster: InProcess) -> None:
    """Nothing else happens meanwhile that would make the engine look."""
    empties = [cluster.engines[decode].fill() for decode in (SMALL, LARGE)]
    answer = await cluster.ask([1, 2, 3], max_tokens=3)

    async def waits() -> bool:
        return any(cluster.engines[decode]._scheduler.waiting for decode in (SMALL, LARGE))

    await until(waits)
    await asyncio.sleep(0.1)
    for empty in empties:
        empty()
    await answer.over()
    assert len(answer.tokens) == 3
    await cluster.settle()


async def test_every_kind_of_fault_is_drawn(cluster: InProcess) -> None:
    faults = Faults(cluster, random.Random(1), 0.0)
    assert {faults._kind() for _ in range(2000)} == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("fault", MESSAGE_FAULTS)
async def test_messages_that_suffer_on_their_way_change_no_answer(hasty: InProcess, fault: str) -> None:
    asked = await questions(hasty, random.Random(1), 10)
    draw = random.Random(2)
    with disturbed(hasty.engines[PREFILL], fault, draw, 0.02), disturbed(hasty.engines[SMALL], fault, draw, 0.02):
        answers = [await hasty.ask(each.prompt, max_tokens=each.max_tokens) for each in asked]
        await asyncio.sleep(2 * HANDOFF_S)
    for each, answer in zip(asked, answers, strict=True):
        await answer.over()
        assert answer.tokens == each.whole
    await hasty.settle()
    refused = [(await replica.counters())["bad_messages"] for replica in hasty.replicas.values()]
    assert (sum(refused) > 0) == (fault == "corrupt"), "what is not as it was sealed is refused"


async def long_question(cluster: InProcess) -> Question:
    return next(each for each in await questions(cluster, random.Random(3), 20) if each.max_tokens > 60)


@pytest.mark.slow
async def test_the_manager_is_replaced_and_sessions_go_on(cluster: InProcess) -> None:
    asked = await long_question(cluster)
    answer = await (await cluster.ask(asked.prompt, max_tokens=asked.max_tokens)).has(2)
    cluster.lose_manager()
    await answer.has(len(answer.tokens) + 2)
    cluster.restart_manager()
    await answer.over()
    assert answer.tokens == asked.whole
    await cluster.settle()
    assert (await cluster.answer(asked.prompt, max_tokens=asked.max_tokens)).tokens == asked.whole


@pytest.mark.slow
async def test_what_another_manager_places_again_is_another_handoff(cluster: InProcess) -> None:
    """The new manager knows nothing of the first placement, whose handoff the replicas remember."""
    asked = await long_question(cluster)
    answer = await (await cluster.ask(asked.prompt, max_tokens=asked.max_tokens)).has(2)
    (owner,) = [task.replica_id for task in tasks_of(cluster, answer.request_id) if "decode" in task.replica_id]
    cluster.engines[owner].go.clear()
    cluster.lose_manager()
    cluster.restart_manager()
    await until(lambda: cluster._are_ready(REPLICAS))
    await cluster.kill(owner)
    await answer.over()
    assert answer.tokens == asked.whole
    assert len({task.epoch for task in tasks_of(cluster, answer.request_id)}) == 2
    await cluster.settle(dead=[owner])


def tasks_of(cluster: InProcess, request_id: str) -> list[SessionTask]:
    return [task for pool in cluster.pools.values() for task in pool.tasks if task.session_id == request_id]


async def test_the_ingress_is_replaced_and_its_sessions_are_cut(cluster: InProcess) -> None:
    asked = await long_question(cluster)
    answer = await (await cluster.ask(asked.prompt, max_tokens=asked.max_tokens)).has(2)
    cluster.kill_ingress()
    await answer.over()
    assert answer.cut
    assert answer.tokens == asked.whole[: len(answer.tokens)]
    assert (await cluster.answer(asked.prompt, max_tokens=asked.max_tokens)).tokens == asked.whole
