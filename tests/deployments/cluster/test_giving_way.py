"""Sessions of a class that yields give way to others, and go on when there is room: the client sees the same answer.

The mock engines have no prefix cache and no tiers: what goes on is computed again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from configs.schema import BatonConfig, ClassConfig
from deployments.manager.calls import Status
from deployments.policy.placement.letting_go import MOST_TIMES
from deployments.replica.parts import Parts
from load_tests.harness.control_plane import PREFILL, SMALL, Answer, InProcess, config, until

CLASSES = {"chat": ClassConfig(), "night": ClassConfig(rank=1, yields=True)}
HALF, MOST, CHAT = 180, 410, 200
"""Tokens of answers: two of the first fill the decode replica as far as what yields may, or one of the second. Beside
them it has no room for one of the third."""
_random = random.Random(29)


def prompt(tokens: int) -> list[int]:
    """A prompt that was not there before."""
    return [_random.randint(100, 40_000) for _ in range(tokens)]


def made() -> BatonConfig:
    return config({"step_s": 0.01}, classes=CLASSES, default_class="chat")


async def begun(cluster: InProcess, asked: list[int], tokens: int) -> Answer:
    """An answer that yields, and has begun."""
    return await (await cluster.ask(asked, max_tokens=tokens, priority="night")).has(5)


async def closed(cluster: InProcess) -> dict[str, int]:
    found: dict[str, int] = (await cluster.manager.ask(Status()))["sessions"]["closed"]
    return found


async def placed_again(cluster: InProcess, answer: Answer, before: int) -> int:
    """Wait until it has a later placement than that of epoch `before`. Returns its epoch."""

    async def look() -> int:
        found = (await cluster.placements()).get(answer.request_id)
        return found["epoch"] if found is not None and found["epoch"] > before else 0

    epoch: int = await until(look)
    return epoch


async def preemptions(cluster: InProcess) -> float:
    return (await cluster.replicas[SMALL].counters())["preemptions"]


async def test_it_gives_way_at_once_and_goes_on_when_there_is_room(launch: Callable[..., Any]) -> None:
    cluster = await launch(made(), [PREFILL, SMALL])
    prompts = [prompt(30), prompt(20), prompt(30)]
    first = await begun(cluster, prompts[0], HALF)
    second = await begun(cluster, prompts[1], HALF)
    chat = await (await cluster.ask(prompts[2], max_tokens=CHAT)).has(1)
    await cluster.queued(1)
    had = len(second.tokens)
    await chat.has(30)
    assert len(second.tokens) == had, "it has stopped"
    assert len(first.tokens) < HALF, "the other one goes on"
    for each in (chat, first, second):
        await each.over()
        assert each.context.error is None
    limits = (HALF, HALF, CHAT)
    alone = [await cluster.local(each, max_tokens=limit) for each, limit in zip(prompts, limits, strict=True)]
    assert [first.tokens, second.tokens, chat.tokens] == alone
    assert await preemptions(cluster) == 0
    assert await closed(cluster) == {"moved": 1, "length": 6}
    await cluster.settle()


async def test_it_gives_way_so_often_and_then_stays(launch: Callable[..., Any]) -> None:
    cluster = await launch(made(), [PREFILL, SMALL])
    asked = prompt(30)
    answer = await begun(cluster, asked, MOST)
    epoch = (await cluster.placed(answer))["epoch"]
    for _ in range(MOST_TIMES):
        chat = await (await cluster.ask(prompt(30), max_tokens=CHAT)).has(1)
        await cluster.queued(1)
        await cluster.abort(chat)
        epoch = await placed_again(cluster, answer, epoch)
        await answer.has(len(answer.tokens) + 2)
    last = await cluster.ask(prompt(30), max_tokens=CHAT)
    await cluster.queued(1)
    assert not last.context.modes, "it waits"
    await answer.over()
    await last.over()
    assert (last.context.error, len(last.tokens)) == (None, CHAT)
    assert answer.tokens == await cluster.local(asked, max_tokens=MOST)
    assert (await closed(cluster))["moved"] == MOST_TIMES
    assert await preemptions(cluster) == 0
    await cluster.settle()


async def test_a_replica_that_was_not_told_in_time_is_told_when_it_reports(
    launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an ingress dies between the placement and the session's beginning."""
    cluster = await launch(made(), [PREFILL, SMALL])
    asked = prompt(30)
    answer = await begun(cluster, asked, MOST)
    monkeypatch.setattr(Parts, "let_go", lambda parts, session_ids: [])
    chat = await cluster.ask(prompt(30), max_tokens=CHAT)
    await cluster.queued(1)
    await chat.over()
    await answer.over()
    assert (answer.context.error, chat.context.error) == (None, None)
    assert answer.tokens == await cluster.local(asked, max_tokens=MOST)
    assert (await closed(cluster))["moved"] == 1
    await cluster.settle()


async def test_one_that_waits_may_be_cancelled(launch: Callable[..., Any]) -> None:
    cluster = await launch(made(), [PREFILL, SMALL])
    answer = await begun(cluster, prompt(30), MOST)
    chat = await (await cluster.ask(prompt(30), max_tokens=CHAT)).has(1)
    await cluster.queued(1)
    await cluster.abort(answer)
    await cluster.queued(0)
    await chat.over()
    assert (chat.context.error, len(chat.tokens)) == (None, CHAT)
    await cluster.settle()
