"""A request that asks for an explanation: it gets one, no engine hears of it, and nothing is reserved or counted."""

from __future__ import annotations

import pytest

from deployments.manager.calls import Open, Status
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, Answer, InProcess, config
from tests.deployments.asked import intercept
from tests.deployments.cluster.asking import ONE_SEAT, STOP, Launch, prompt


async def explained(cluster: InProcess, max_tokens: int = 7) -> Answer:
    return await cluster.answer(prompt(20), max_tokens=max_tokens, explains=True)


async def test_it_says_where_the_request_would_go(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Open] = []

    async def note(call: Open) -> None:
        opened.append(call)

    intercept(monkeypatch, cluster.manager, Open, note)
    answer = await explained(cluster)
    assert (answer.reason, answer.tokens, answer.context.error) == (STOP, [], None)
    found = answer.context.explanation
    assert found is not None
    assert found["decision"]["mode"] == "disaggregated"
    assert (found["decision"]["prefill"], found["decision"]["decode"] in (SMALL, LARGE)) == (PREFILL, True)
    assert (found["request"]["prompt_tokens"], found["request"]["max_tokens"]) == (20, 7)
    assert opened == []
    status = await cluster.manager.ask(Status())
    assert (status["promises"], status["modes"], status["sessions"]["closed"]) == ([], {}, {})
    assert answer.context.modes == set()
    await cluster.settle()


async def test_it_says_what_a_request_would_wait_for(launch: Launch) -> None:
    cluster = await launch(config(ONE_SEAT))
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.clear()
    running = [await cluster.ask(prompt(8), max_tokens=5) for _ in range(2)]
    for each in running:
        await cluster.placed(each)
    answer = await explained(cluster)
    assert answer.context.explanation is not None
    decision = answer.context.explanation["decision"]
    assert (decision["outcome"], decision["reason"]) == ("waits", "every replica that fits runs its most sessions")
    for replica_id in (SMALL, LARGE):
        cluster.engines[replica_id].go.set()
    for each in running:
        await each.over()
    await cluster.settle()


async def test_it_ends_when_its_client_leaves(cluster: InProcess) -> None:
    answer = await cluster.ask(prompt(9), max_tokens=5, explains=True)
    await cluster.abort(answer)
    await cluster.settle()
