"""Random faults under a crowd: every answer is whole and right, or ends with an error; nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from load_tests.chaos import Crowd, Faults, questions
from load_tests.control_plane import InProcess, config, in_process, until

QUESTIONS, CLIENTS, FAULTS = 60, 24, 40


@pytest.fixture
async def cluster(no_leaks: None) -> AsyncIterator[InProcess]:
    async with in_process(config(max_attempts=8, queue_timeout_s=20.0)) as made:
        yield made

    async def alone() -> bool:
        return asyncio.all_tasks() == {asyncio.current_task()}

    await until(alone)


@pytest.mark.parametrize("seed", range(2))
async def test_answers_are_right_whatever_happens(cluster: InProcess, seed: int) -> None:
    asked = await questions(cluster, random.Random(seed), QUESTIONS)
    crowd, faults = Crowd(cluster, asked, random.Random(100 + seed)), Faults(cluster, random.Random(200 + seed), 0.05)
    disturbing = asyncio.create_task(faults.run(FAULTS))
    await crowd.run(CLIENTS, disturbing.done)
    await disturbing
    await cluster.settle()
    assert len(faults.counts) == 4
    assert faults.pauses_s(), "nobody was ever disturbed"
    verdicts = Counter(each.verdict() for each in crowd.asked)
    assert verdicts.keys() <= {"whole", "left", "refused", "failed"}, verdicts
    assert verdicts["failed"] <= 0.02 * len(crowd.asked), verdicts
