"""A real engine in phases gives the answers of one that vLLM schedules by itself."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from configs.schema import VllmEngineConfig
from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, resolve
from deployments.messages import Role
from tests.deployments.engine.conftest import VLLM, WAIT_S, Running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SEATS = 6
"""Fewer than requests, so that a second prefill phase begins while answers are written."""
Start = Callable[[Role, Path, VllmEngineConfig], Awaitable[Running]]


def requests() -> list[tuple[list[int], int]]:
    """Prompts and the lengths of their answers; half of the prompts are longer than a step."""
    rng = random.Random(5)
    return [([rng.randint(100, 40_000) for _ in range(rng.randint(5, 500))], rng.randint(1, 40)) for _ in range(16)]


async def answers(start: Start, phases: bool) -> tuple[list[list[int]], Running]:
    """Every answer, of requests that come together; the engine has ended."""
    config = VLLM.model_copy(update={"phases": phases, "max_num_seqs": SEATS})
    engine = await start(Role.MIXED, Path(resolve("bundled:smollm2-135m-instruct", DEFAULT_CACHE_DIR)), config)
    try:
        sent = [
            await engine.send(f"r{number}", prompt, max_tokens=length)
            for number, (prompt, length) in enumerate(requests())
        ]
        await asyncio.wait_for(asyncio.gather(*(each.done.wait() for each in sent)), 2 * WAIT_S)
        await engine.settle()
        return [each.tokens for each in sent], engine
    finally:
        await engine.close()


async def test_answers_are_those_of_the_default_scheduler(start_vllm: Start) -> None:
    plain, _ = await answers(start_vllm, phases=False)
    phased, engine = await answers(start_vllm, phases=True)
    assert [len(each) for each in plain] == [length for _, length in requests()]
    assert phased == plain
    steps = [sample for step in engine.steps for sample in step.steps]
    # A prompt's last piece of one token is counted as decoding.
    assert not any(sample.prefill_tokens and sample.decode_sequences > 1 for sample in steps)
    kinds = [sample.prefill_tokens > 0 for sample in steps]
    assert sum(one != other for one, other in itertools.pairwise(kinds)) >= 3, "more than one phase of each"
    assert engine.most_running <= SEATS
    assert engine.load.counters["preemptions"] == 0
