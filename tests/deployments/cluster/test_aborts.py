"""A client cancels: wherever its session is at that moment, nothing is left of it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from deployments.cluster import request_context
from deployments.manager.calls import Close, Open, PrefillDone, Report, Status, View
from deployments.messages import ReplicaInfo, SessionTask
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, InProcess, config
from tests.deployments.cluster.asking import ONE_SEAT, Launch, prompt


async def test_aborting_in_the_queue(launch: Launch) -> None:
    cluster = await launch(config(ONE_SEAT))
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    asked = [prompt(8) for _ in range(3)]
    first, second = [await cluster.ask(each, max_tokens=5) for each in asked[:2]]
    await cluster.placed(first)
    await cluster.placed(second)
    third = await cluster.ask(asked[2], max_tokens=5)
    await cluster.queued(1)
    await cluster.core.abort_requests_async([third.request_id])
    await cluster.queued(0)
    assert set(await cluster.placements()) == {first.request_id, second.request_id}
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    for each, answer in zip(asked, (first, second), strict=False):
        await answer.over()
        assert answer.tokens == await cluster.local(each, max_tokens=5)
    assert not third.outputs
    await cluster.settle()


async def test_a_session_makes_no_call_in_its_request_s_context(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve cancels every call made in the context of a request when its client goes away, the closing one too."""
    heard: dict[type[object], object] = {}

    def listen(owner: object, method: str) -> None:
        original = getattr(owner, method)

        async def listening(argument: Any) -> Any:
            if not isinstance(argument, Report | View | Status):
                heard[type(argument)] = request_context.current.get()
            return await original(argument)

        monkeypatch.setattr(owner, method, listening)

    async def finding(replica: ReplicaInfo, task: SessionTask) -> str:
        heard[type(task)] = request_context.current.get()
        return await find(replica, task)

    listen(cluster.manager, "ask")
    find = cluster.fleet.find
    monkeypatch.setattr(cluster.fleet, "find", finding)
    await cluster.answer(prompt(8), max_tokens=5)
    await cluster.settle()
    assert heard == dict.fromkeys((Open, SessionTask, PrefillDone, Close))


async def test_aborting_before_the_session_begins(cluster: InProcess) -> None:
    answer = await cluster.ask(prompt(8), max_tokens=5)
    await cluster.core.abort_requests_async([answer.request_id, "unknown"])
    await cluster.settle()
    assert not answer.outputs


async def test_aborting_while_it_is_prefilled(cluster: InProcess) -> None:
    """The session is closed at once; the engine gives its blocks back when its step is over."""
    cluster.engines[PREFILL].go.clear()
    answer = await cluster.ask(prompt(200), max_tokens=5)
    await cluster.stopped(PREFILL)
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.closed()
    cluster.engines[PREFILL].go.set()
    await cluster.settle()
    assert not answer.outputs


async def test_aborting_at_the_handoff_holds_the_blocks_until_no_write_is_under_way(cluster: InProcess) -> None:
    cluster.planes[PREFILL].shut = True
    answer = await (await cluster.ask(prompt(200), max_tokens=5)).has(1)
    placed = await cluster.placed(answer)
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.closed()
    assert cluster.planes[PREFILL].writes
    for held in (PREFILL, placed["decode"]):
        assert cluster.engines[held].used_blocks >= 50, "a write could still touch them"
    cluster.planes[PREFILL].shut = False
    await cluster.settle()
    assert len(answer.tokens) == 1


async def test_aborting_while_it_decodes(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=400)).has(3)
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.settle()
    assert answer.reason is None
    assert len(answer.tokens) < 400


async def test_aborts_at_any_moment_leave_nothing(cluster: InProcess) -> None:
    """Some of a crowd go, each after another number of turns of the event loop; the others get their answers."""
    prompts = [prompt(5 + 9 * n % 70) for n in range(24)]
    answers = [await cluster.ask(each, max_tokens=20) for each in prompts]
    turns = random.Random(6)
    for number, answer in enumerate(answers):
        if number % 3:
            for _ in range(turns.randrange(40)):
                await asyncio.sleep(0)
            await cluster.core.abort_requests_async([answer.request_id])
    for each, answer in list(zip(prompts, answers, strict=True))[::3]:
        await answer.over()
        assert answer.tokens == await cluster.local(each, max_tokens=20)
    await cluster.settle()
