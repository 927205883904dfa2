"""Sessions that a replica lets go: another one goes on with them, and the client sees the very same answer.

The mock engines have no prefix cache: the replica that lets go computes again what it hands over.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from deployments.cluster.recovery import Limits
from deployments.errors import ReplicaLost
from deployments.manager.calls import Status
from deployments.messages import Mode, Phase
from load_tests.chaos.crowd import Crowd, questions
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, WAIT_S, Answer, InProcess, config, until

LONG = 200
_random = random.Random(17)


def prompt(tokens: int) -> list[int]:
    """A prompt that was not there before."""
    return [_random.randint(100, 40_000) for _ in range(tokens)]


async def owner_of(cluster: InProcess, answer: Answer) -> str:
    return str((await cluster.placed(answer))["decode"])


async def begun(cluster: InProcess, asked: list[int], **sampling: Any) -> tuple[Answer, str]:
    """A long answer of which decode has given some tokens, and the replica that gives them."""
    answer = await (await cluster.ask(asked, **{"max_tokens": LONG, **sampling})).has(5)
    return answer, await owner_of(cluster, answer)


def other(replica_id: str) -> str:
    return LARGE if replica_id == SMALL else SMALL


async def counter(cluster: InProcess, name: str) -> float:
    """Summed over the decode engines."""
    counters = [await cluster.replicas[each].counters() for each in (SMALL, LARGE) if each in cluster.replicas]
    return sum(each[name] for each in counters)


async def closed(cluster: InProcess) -> dict[str, int]:
    found: dict[str, int] = (await cluster.manager.ask(Status()))["sessions"]["closed"]
    return found


async def test_a_session_is_moved_and_its_answer_is_the_same(cluster: InProcess) -> None:
    asked = prompt(30)
    answer, source = await begun(cluster, asked)
    written = (await cluster.engines[source].counters())["blocks_written"]
    assert cluster.replicas[source].move_out([answer.request_id]) == 1
    await until(lambda: moved_to(cluster, answer, other(source)))
    placed = await cluster.placed(answer)
    assert (placed["prefill"], placed["reason"], placed["epoch"]) == (source, "moved", 2)
    await answer.over()
    assert (answer.context.error, answer.context.modes) == (None, {Mode.DISAGGREGATED})
    assert answer.tokens == await cluster.local(asked, max_tokens=LONG)
    assert (await cluster.engines[source].counters())["blocks_written"] > written, "the KV cache went by the channel"
    await cluster.settle()
    assert await closed(cluster) == {"moved": 1, "length": 2}
    counted = {
        name: each["counters"]["moved_out"] for name, each in (await cluster.manager.ask(Status()))["replicas"].items()
    }
    assert counted == {PREFILL: 0, source: 1, other(source): 0}
    assert not cluster.manager._allocator.breakers, "a move is no failure"


async def moved_to(cluster: InProcess, answer: Answer, replica_id: str) -> bool:
    promise = (await cluster.placements()).get(answer.request_id)
    return promise is not None and promise["decode"] == replica_id


async def test_a_session_is_moved_to_and_fro(cluster: InProcess) -> None:
    """More often than a session may be lost."""
    asked = prompt(30)
    answer, owner = await begun(cluster, asked)
    for move in range(6):
        await answer.has(len(answer.tokens) + 8)
        cluster.replicas[owner].move_out()
        owner = other(owner)
        await until(partial(moved_to, cluster, answer, owner))
        assert (await cluster.placed(answer))["epoch"] == 2 + move
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=LONG)
    await cluster.settle()
    assert (await closed(cluster))["moved"] == 6


async def test_moves_have_a_bound_too(launch: Callable[..., Any]) -> None:
    cluster = await launch(config(), limits=Limits(1, moves=1))
    answer, owner = await begun(cluster, prompt(30))
    cluster.replicas[owner].move_out()
    await until(lambda: moved_to(cluster, answer, other(owner)))
    await answer.has(len(answer.tokens) + 8)
    cluster.replicas[other(owner)].move_out()
    await answer.over()
    assert answer.reason is FinishReason.ERROR
    assert isinstance(answer.context.error, ReplicaLost)
    await cluster.settle()


async def test_what_cannot_go_on_elsewhere_stays(cluster: InProcess) -> None:
    asked = prompt(30)
    answer, owner = await begun(cluster, asked, thinking_token_budget=9)
    assert cluster.replicas[owner].move_out() == 0
    await answer.over()
    assert (answer.reason, len(answer.tokens)) == (FinishReason.LENGTH, LONG)
    await cluster.settle()
    assert "moved" not in await closed(cluster)


async def test_a_session_that_has_not_begun_is_let_go_at_its_first_output(cluster: InProcess) -> None:
    for plane in cluster.planes.values():
        plane.shut = True
    asked = prompt(30)
    answer = await (await cluster.ask(asked, max_tokens=LONG)).has(1)
    owner = await owner_of(cluster, answer)
    assert cluster.replicas[owner].move_out() == 1
    assert (await cluster.placed(answer))["epoch"] == 1, "its KV cache is not here yet"
    for plane in cluster.planes.values():
        plane.shut = False
    await until(lambda: moved_to(cluster, answer, other(owner)))
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=LONG)
    await cluster.settle()


async def test_a_draining_replica_hands_over(cluster: InProcess) -> None:
    asked = prompt(30)
    answer, owner = await begun(cluster, asked)
    cluster.replicas[owner]._life.phase = Phase.DRAINING
    assert cluster.replicas[owner].move_out() == 1
    await answer.over()
    assert answer.context.error is None
    assert answer.tokens == await cluster.local(asked, max_tokens=LONG)
    await cluster.closed()
    assert await closed(cluster) == {"moved": 1, "length": 2}
    cluster.replicas[owner]._life.phase = Phase.READY
    cluster.replicas[owner]._reporter.tell()
    await until(lambda: cluster._are_ready([owner]))
    await cluster.settle()


async def test_without_another_with_room_it_goes_on_where_there_is_some(launch: Callable[..., Any]) -> None:
    """The replica that lets it go is the only one."""
    cluster = await launch(config(), [PREFILL, LARGE])
    asked = prompt(30)
    answer, _ = await begun(cluster, asked)
    assert cluster.replicas[LARGE].move_out() == 1
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=LONG)
    await cluster.settle()
    assert (await closed(cluster))["moved"] == 1


@pytest.mark.parametrize("victim", ["source", "target"])
async def test_a_replica_dies_in_the_midst_of_a_move(cluster: InProcess, victim: str) -> None:
    asked = prompt(30)
    answer, source = await begun(cluster, asked)
    cluster.planes[source].shut = True
    cluster.replicas[source].move_out()
    await until(lambda: moved_to(cluster, answer, other(source)))

    async def writing() -> bool:
        return bool((await cluster.engines[source].counters())["open_writing"])

    await until(writing)
    cluster.planes[source].broken = True
    dead = source if victim == "source" else other(source)
    await cluster.kill(dead)
    cluster.planes[source].shut = cluster.planes[source].broken = False
    await answer.over()
    assert answer.context.error is None
    assert answer.tokens == await cluster.local(asked, max_tokens=LONG)
    await cluster.settle(dead=[dead])
    outcomes = await closed(cluster)
    assert outcomes["moved"] == 1
    assert outcomes["lost"] in (1, 2), "that KV did not come may be known before the death, and then it is tried there"


async def test_a_move_is_cancelled(cluster: InProcess) -> None:
    for wait_for_writes in (False, True):
        answer, source = await begun(cluster, prompt(30))
        cluster.planes[source].shut = True
        cluster.replicas[source].move_out()
        if wait_for_writes:
            writes = cluster.planes[source].writes

            async def writing(source: str = source, writes: int = writes) -> bool:
                return cluster.planes[source].writes > writes

            await until(writing)
        await cluster.core.abort_requests_async([answer.request_id])
        cluster.planes[source].shut = False
        await cluster.settle()
        assert answer.reason is None


async def test_outputs_that_never_came_are_computed_again(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt(30)
    answer, source = await begun(cluster, asked)
    live = cluster.replicas[source]._parts.open[answer.request_id]
    with monkeypatch.context() as deaf:
        deaf.setattr(live.ingress, "give", lambda frames, finished: True)
        taken = live.output_tokens

        async def went_on() -> bool:
            return live.output_tokens > taken + 3

        await until(went_on)
        cluster.replicas[source].move_out()
    await answer.over()
    assert answer.tokens == await cluster.local(asked, max_tokens=LONG)
    await cluster.settle()


@pytest.mark.slow
async def test_a_crowd_is_moved_about_at_random_and_no_answer_changes(cluster: InProcess) -> None:
    draw = random.Random(3)
    crowd = Crowd(cluster, await questions(cluster, draw, 30), draw)

    async def move() -> None:
        for _ in range(60):
            cluster.replicas[draw.choice([SMALL, LARGE])].move_out()
            await asyncio.sleep(0.02)

    moving = asyncio.create_task(move())
    await crowd.run(16, moving.done)
    await moving
    await cluster.settle()
    verdicts = Counter(each.verdict() for each in crowd.asked)
    assert verdicts.keys() <= {"whole", "left"}, verdicts
    assert (await closed(cluster))["moved"] > 10


# ---- before memory runs out

TIGHT = {"max_tokens": 400}
"""Of these, 576 tokens of `SMALL` hold one whole answer, and promise two with an overcommit of 2."""


@pytest.mark.slow
async def test_sessions_are_moved_before_blocks_run_out(launch: Callable[..., Any]) -> None:
    cluster = await launch(config(overcommit=2.0), [PREFILL, SMALL])
    asked = [prompt(20), prompt(21)]
    answers = [await cluster.ask(each, **TIGHT) for each in asked]
    for answer in answers:
        await answer.has(5)
        assert await owner_of(cluster, answer) == SMALL
    await cluster.start(LARGE)
    for each, answer in zip(asked, answers, strict=True):
        await answer.over()
        assert answer.tokens == await cluster.local(each, **TIGHT)
    await cluster.settle()
    assert await counter(cluster, "preemptions") == 0
    assert (await closed(cluster))["moved"] >= 1


@pytest.mark.slow
async def test_where_no_replica_has_room_no_session_is_moved(launch: Callable[..., Any]) -> None:
    cluster = await launch(config(overcommit=2.0), [PREFILL, SMALL])
    asked = [prompt(20), prompt(21)]
    answers = [await cluster.ask(each, **TIGHT) for each in asked]
    for each, answer in zip(asked, answers, strict=True):
        await answer.over()
        assert answer.tokens == await cluster.local(each, **TIGHT)
    await cluster.settle()
    assert (await cluster.engines[SMALL].counters())["preemptions"] > 0
    assert "moved" not in await closed(cluster)


@pytest.mark.slow
async def test_a_crowd_under_pressure_is_answered_right(launch: Callable[..., Any]) -> None:
    """More is promised than there is on both replicas: sessions move while there is room, and all end well."""
    cluster = await launch(config(overcommit=2.0))
    asked = [prompt(8 + n) for n in range(12)]
    limits = [60 + 30 * n for n in range(12)]
    answers = [await cluster.ask(each, max_tokens=limit) for each, limit in zip(asked, limits, strict=True)]
    for each, limit, answer in zip(asked, limits, answers, strict=True):
        await asyncio.wait_for(answer.over(), WAIT_S)
        assert answer.context.error is None
        assert answer.tokens == await cluster.local(each, max_tokens=limit)
    await cluster.settle()
