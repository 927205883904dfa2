"""Answers that move because the rest of them costs less elsewhere: the client sees the very same answer.

A prompt of the mock engines takes seconds here, and every answer makes a step longer. What is weighed is tested in
`tests/deployments/policy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from configs.schema import BatonConfig
from deployments.manager.calls import Status
from deployments.policy.placement.rebalance import REST_S
from load_tests.harness.control_plane import LARGE, PREFILL, Answer, InProcess, config, until

PACE = {"step_s": 0.004, "sequence_s": 0.002, "prefill_tokens_per_s": 200.0}
FIRST, SECOND = "mixed-main-0", "mixed-main-1"
LONG_PROMPT = 420  # over two seconds, or four
_random = random.Random(18)
pytestmark = pytest.mark.slow


def prompt(tokens: int) -> list[int]:
    """A prompt that was not there before."""
    return [_random.randint(100, 40_000) for _ in range(tokens)]


def mixed(pace: dict[str, float] = PACE, **placement: Any) -> BatonConfig:
    """One pool of mixed replicas."""
    made = config(pace, scale=4, **{"split": "auto", **placement})
    return made.model_copy(update={"prefill": None, "decode": {}, "mixed": {"main": made.decode["large"]}})


def unlike(strict: bool) -> BatonConfig:
    """A prefill pool and a decode pool. `strict`: of the prefill pool."""
    made = config(PACE, scale=4, split="auto")
    prefill = made.pools["prefill"].model_copy(update={"strict": strict})
    return made.model_copy(update={"prefill": prefill, "decode": {"large": made.decode["large"]}})


async def asked_in_turn(cluster: InProcess, prompts: Iterable[list[int]], tokens: int) -> list[Answer]:
    """Answers, each of which has begun before the next one is asked for."""
    return [await (await cluster.ask(each, max_tokens=tokens)).has(3) for each in prompts]


async def whole(launch: Callable[..., Any], prompts: list[list[int]], answers: list[Answer]) -> None:
    """Wait for the ends of the answers, and compare them with those of a replica that keeps them."""
    for answer in answers:
        await answer.over()
        assert answer.context.error is None
    alone = await launch(config(), [PREFILL, LARGE])
    limits = [len(answer.tokens) for answer in answers]
    told = [alone.local(each, max_tokens=limit) for each, limit in zip(prompts, limits, strict=True)]
    assert [answer.tokens for answer in answers] == await asyncio.gather(*told)
    await alone.settle()


async def closed(cluster: InProcess) -> dict[str, int]:
    found: dict[str, int] = (await cluster.manager.ask(Status()))["sessions"]["closed"]
    return found


@contextlib.asynccontextmanager
async def watched(cluster: InProcess) -> AsyncIterator[dict[str, list[tuple[float, str]]]]:
    """Where each answer is written, and since when."""
    owners: dict[str, list[tuple[float, str]]] = {}

    async def watch() -> None:
        while True:
            for session_id, promise in (await cluster.placements()).items():
                seen = owners.setdefault(session_id, [])
                if not seen or seen[-1][1] != promise["decode"]:
                    seen.append((time.monotonic(), promise["decode"]))
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    try:
        yield owners
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def rests(owners: dict[str, list[tuple[float, str]]]) -> list[float]:
    """Seconds between two moves of one answer."""
    return [later[0] - earlier[0] for seen in owners.values() for earlier, later in itertools.pairwise(seen[1:])]


async def test_an_answer_makes_way_for_a_long_prompt(launch: Callable[..., Any]) -> None:
    cluster = await launch(mixed(PACE | {"prefill_tokens_per_s": 100.0}), [FIRST, SECOND])
    prompts = [prompt(8), prompt(9), prompt(LONG_PROMPT)]
    async with watched(cluster) as owners:
        answers = await asked_in_turn(cluster, prompts[:2], 300)
        answers.append(await cluster.ask(prompts[2], max_tokens=20))
        long = await cluster.placed(answers[2])
        computes: str = long["prefill"] or long["decode"]
        beside = [each.request_id for each in answers[:2] if owners[each.request_id][-1][1] == computes]
        assert len(beside) == 1, "each replica writes one answer"

        async def has_gone() -> bool:
            return owners[beside[0]][-1][1] != computes

        await until(has_gone)
        assert (await cluster.placements())[long["session_id"]]["prefilling"], "while the prompt is computed"
        await whole(launch, prompts, answers)
    assert all(each > REST_S / 2 for each in rests(owners))
    await cluster.settle()
    assert (await closed(cluster))["moved"] == sum(len(seen) - 1 for seen in owners.values())


@pytest.mark.parametrize("strict", [False, True])
async def test_an_idle_prefill_replica_takes_answers_over(launch: Callable[..., Any], strict: bool) -> None:
    """It starts when all answers are on the decode replica. A strict one takes none."""
    cluster = await launch(unlike(strict), [LARGE])
    prompts = [prompt(6 + number) for number in range(8)]
    async with watched(cluster) as owners:
        answers = [await cluster.ask(each, max_tokens=100) for each in prompts]
        for answer in answers:
            await answer.has(2)
        await cluster.start(PREFILL)
        await whole(launch, prompts, answers)
    assert {seen[0][1] for seen in owners.values()} == {LARGE}
    gone = [seen for seen in owners.values() if len(seen) > 1]
    assert [seen[1][1] for seen in gone] == [PREFILL] * len(gone)
    assert bool(gone) is not strict
    assert all(each > REST_S / 2 for each in rests(owners))
    await cluster.settle()
    assert (await closed(cluster)).get("moved", 0) == sum(len(seen) - 1 for seen in owners.values())


async def test_nothing_moves_where_a_move_costs_more_than_it_saves(launch: Callable[..., Any]) -> None:
    """An answer beside a prompt that is about to end, and answers of which each replica has as many."""
    cluster = await launch(mixed(), [FIRST, SECOND])
    prompts = [prompt(8), prompt(9), prompt(30)]
    answers = await asked_in_turn(cluster, prompts[:2], 200)
    answers.append(await cluster.ask(prompts[2], max_tokens=20))
    await whole(launch, prompts, answers)
    await cluster.settle()
    assert "moved" not in await closed(cluster)
