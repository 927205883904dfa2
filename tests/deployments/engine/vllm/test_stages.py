"""Our channel between real engines of pipeline stages: on one side, on both, and beside tensor parallelism.

The model has three layers, so the first of two stages has two of them.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from configs.schema import PoolConfig
from deployments.host.processes import descendants, parents
from deployments.manager.calls import Drain
from deployments.messages import Mode
from load_tests.harness.control_plane import PREFILL, SMALL, until
from tests.deployments.engine.vllm.test_channel import (
    SAMPLING,
    VOCABULARY,
    are_as_undisturbed,
    check,
    cluster,
    is_back,
    model,
    pool,
    prompt,
    undisturbed_answers,
)

__all__ = ["model"]  # the fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def stages(tensor_parallel_size: int = 1) -> PoolConfig:
    return pool(tensor_parallel_size, pipeline_parallel_size=2)


def words(tokens: int) -> list[int]:
    """A prompt. Of those below, no answer has two tokens that are about as likely, which engines may tell apart."""
    draw = random.Random(7000 + tokens)
    return [draw.randrange(10, VOCABULARY) for _ in range(tokens)]


def reference(model: Path, asked: list[int], tokens: int) -> list[int]:
    """The most likely answer, of the model alone."""
    whole = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = whole.generate(torch.tensor([asked]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return list(found[0, len(asked) :].tolist())


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(stages(), pool()), (pool(), stages()), (stages(), stages()), (pool(2), stages()), (stages(2), pool())],
    ids=["2-to-1", "1-to-2", "2-to-2", "heads-to-stages", "both-to-none"],
)
async def test_layers_are_split_on_the_way(model: Path, prefill: PoolConfig, decode: PoolConfig) -> None:
    async with cluster(model, prefill, decode) as engines:
        await check(engines, [2, 33, 64, 200], block_size=32)
        for tokens in (5, 130):
            asked = words(tokens)
            answer = await (await engines.ask(asked, max_tokens=8)).over()
            assert answer.context.modes == {Mode.DISAGGREGATED}
            assert answer.tokens == reference(model, asked, 8)


async def test_every_kind_of_request_is_exact_where_both_sides_have_stages(model: Path) -> None:
    """All at once, so that batches follow each other through the stages."""
    async with cluster(model, stages(), stages()) as engines:
        asked = [(prompt(40 + 9 * n), {**sampling, "max_tokens": 30}) for n, sampling in enumerate(SAMPLING)]
        whole = await undisturbed_answers(engines, asked)
        answers = [await engines.ask(each, **sampling) for each, sampling in asked]
        await are_as_undisturbed(answers, whole)
        assert {mode for answer in answers for mode in answer.context.modes} == {Mode.DISAGGREGATED}
        await engines.all_is_free()


async def test_stages_fetch_what_an_engine_without_stages_has_in_its_cache(model: Path) -> None:
    """And the other way about: what was handed over to that engine is what it has."""
    strict = stages().model_copy(update={"strict": True})
    async with cluster(model, strict, pool(), fetch=True) as engines:
        for cached, tokens in ((512, 700), (300, 301)):
            known = words(tokens)
            await engines.manager.ask(Drain(PREFILL))
            await engines.alone(known[:cached], max_tokens=1)
            await engines.manager.ask(Drain(PREFILL, resume=True))
            blocks = cached // 32
            await is_back(engines, known, blocks)
            before = await engines.replicas[PREFILL].counters()
            answer = await (await engines.ask(known, max_tokens=6)).over()
            after = await engines.replicas[PREFILL].counters()
            assert after["blocks_fetched"] - before["blocks_fetched"] == 2 * blocks, "each stage its layers"
            assert after["fetches_broken"] == 0
            assert answer.tokens == reference(model, known, 6)
        await engines.all_is_free()


@pytest.mark.parametrize("role", [PREFILL, SMALL])
async def test_an_engine_of_which_a_stage_is_killed_ends_and_its_answers_go_on_elsewhere(
    model: Path, role: str
) -> None:
    """Decode's blocks and prefill's are free again, and tokens are as if nothing had been."""
    async with cluster(model, *((stages(), pool()) if role == PREFILL else (pool(), stages()))) as engines:
        asked = [words(100 + 30 * n) for n in range(4)]
        answers = [await engines.ask(each, max_tokens=200) for each in asked]
        for answer in answers:
            await answer.has(1 if role == PREFILL else 5)
        os.kill(last_stage(), signal.SIGKILL)
        for each, answer in zip(asked, answers, strict=True):
            await answer.over()
            assert answer.context.error is None
            assert answer.tokens == reference(model, each, 200)
        left = engines.replicas[SMALL if role == PREFILL else PREFILL]

        async def is_conserved() -> bool:
            counters = await left.counters()
            return not counters["open_writing"] and not counters["open_receiving"]

        await until(is_conserved)
        assert await (await engines.ask(prompt(50), max_tokens=3)).over()


async def test_answers_go_on_without_a_prefill_engine_that_has_not_noticed_yet_that_a_stage_was_killed(
    model: Path,
) -> None:
    """Its core is stopped, so it says nothing. Each handoff from it fails at once, for its stage is not there."""
    async with cluster(model, stages(), pool()) as engines:
        whole = await engines.ask(words(100), max_tokens=8)
        await whole.over()
        core = parents()[last_stage()]
        os.kill(core, signal.SIGSTOP)
        try:
            os.kill(last_stage(), signal.SIGKILL)
            answer = await (await engines.ask(words(100), max_tokens=8)).over()
            assert answer.context.error is None
            assert answer.context.modes == {Mode.DISAGGREGATED, Mode.DECODE_LOCAL}
            assert answer.tokens == whole.tokens
        finally:
            os.kill(core, signal.SIGCONT)


def last_stage() -> int:
    """The process of the only worker of a second stage."""
    found = [pid for pid in descendants(os.getpid()) if b"Worker_PP1" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]
