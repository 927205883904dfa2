"""Real engines with vLLM's own NIXL connector under the cluster core, without Ray: the answers, and what is left."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason

from configs.schema import (
    BatonConfig,
    ChannelConfig,
    ModelConfig,
    PlacementConfig,
    PoolConfig,
    ResourcesConfig,
    VllmEngineConfig,
)
from deployments.engine.build import environment
from deployments.engine.protocol import Step
from deployments.manager.calls import Status
from deployments.messages import Mode, StepSample
from load_tests.harness.control_plane import PREFILL, SMALL, until
from tests.deployments.real_engines import RealEngines
from transfer.memory.blocks import chained_hashes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
ENGINE = VllmEngineConfig(kv_cache_memory_bytes=512 << 20, max_num_batched_tokens=256)
POOL = PoolConfig(engine=ENGINE, resources=ResourcesConfig())
CONFIG = BatonConfig(
    model=ModelConfig(dtype="float32"),
    prefill=POOL,
    decode={"small": POOL},
    channel=ChannelConfig(kind="vllm", handoff_timeout_s=200),  # no test waits so long for a lease
    placement=PlacementConfig(split="always", snapshot_interval_s=0.01),
)
_random = random.Random(3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[RealEngines]:
    os.environ.update(environment(CONFIG, "prefill"))
    made = RealEngines(CONFIG)
    try:
        await made.start(PREFILL, SMALL)
        yield made
    finally:
        await made.close()


def prompt(tokens: int) -> list[int]:
    return [_random.randint(100, 40_000) for _ in range(tokens)]


@pytest.mark.parametrize("tokens", [2, 129, 300])
async def test_a_pulled_answer_is_the_answer_of_one_engine(cluster: RealEngines, tokens: int) -> None:
    asked = prompt(tokens)
    answer = await cluster.answer(asked, max_tokens=8)
    assert answer.context.modes == {Mode.DISAGGREGATED}
    assert (len(answer.tokens), answer.reason) == (8, FinishReason.LENGTH)
    assert answer.tokens == await cluster.alone(asked, max_tokens=8)
    again = await cluster.answer(asked, max_tokens=8)
    assert again.tokens == answer.tokens, "with the prompt in both prefix caches"
    await cluster.all_is_free()


async def test_decode_pulls_the_prompt_and_computes_none_of_it(cluster: RealEngines) -> None:
    before = [await cluster.replicas[replica_id].counters() for replica_id in (PREFILL, SMALL)]
    await cluster.answer(prompt(200), max_tokens=3)
    prefill, decode = [await cluster.replicas[replica_id].counters() for replica_id in (PREFILL, SMALL)]
    assert prefill["computed_tokens"] - before[0]["computed_tokens"] == 200
    assert decode["computed_tokens"] == before[1]["computed_tokens"]
    assert decode["loaded_tokens"] - before[1]["loaded_tokens"] == 200


async def test_both_sides_tell_what_their_steps_computed(cluster: RealEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[StepSample]] = {}

    def listen(replica_id: str) -> None:
        replica = cluster.replicas[replica_id]
        take = replica._take

        def taken(step: Step) -> None:
            told.setdefault(replica_id, []).extend(step.steps)
            take(step)

        monkeypatch.setattr(replica, "_take", taken)

    listen(PREFILL)
    listen(SMALL)
    await cluster.answer(prompt(5), max_tokens=2)  # what waits for a step already is not told of it
    told.clear()
    await cluster.answer(prompt(200), max_tokens=3)
    prefill, decode = told[PREFILL], told[SMALL]
    assert [sum(step.prefill_tokens for step in steps) for steps in (prefill, decode)] == [200, 0]
    assert sum(step.prefill_context for step in prefill) == sum(range(200))
    assert [step.decode_context for step in decode] == [200, 201, 202], "the prompt's last position, then the answer's"


async def test_the_manager_learns_what_both_sides_cache(cluster: RealEngines) -> None:
    asked = prompt(300)
    await cluster.answer(asked, max_tokens=3)
    index = cluster.manager._allocator.predictors.index

    async def is_confirmed() -> bool:
        return not index.expected

    await until(is_confirmed)
    assert index.hits(chained_hashes(asked, ENGINE.block_size)) == {PREFILL: 2, SMALL: 2}
    assert index.knows(PREFILL)
    assert index.knows(SMALL)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": 7},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"structured_outputs": StructuredOutputsParams(regex="(ab|cd)+")},
    ],
    ids=["seed", "penalties", "grammar"],
)
async def test_what_counts_generated_tokens_is_exact(cluster: RealEngines, sampling: dict[str, Any]) -> None:
    if grammar := sampling.get("structured_outputs"):
        grammar._backend = "xgrammar"  # as vLLM's frontend chooses
    asked = prompt(140)
    answer = await cluster.answer(asked, max_tokens=8, **sampling)
    assert answer.context.modes == {Mode.DISAGGREGATED}
    assert len(answer.tokens) == 8
    assert answer.tokens == await cluster.alone(asked, max_tokens=8, **sampling)


async def test_several_at_once_the_same_prompt_among_them(cluster: RealEngines) -> None:
    prompts = [prompt(30 + 60 * n) for n in range(4)]
    prompts += prompts[2:]
    answers = [await cluster.ask(each, max_tokens=6) for each in prompts]
    for each, answer in zip(prompts, answers, strict=True):
        assert (await answer.over()).tokens == await cluster.alone(each, max_tokens=6)
    await cluster.all_is_free()


@pytest.mark.parametrize("when", ["prefilling", "held", "pulling", "decoding"])
async def test_a_cancel_frees_both_sides(cluster: RealEngines, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Held: the prefill is over and decode never comes. Pulling: the cancel meets decode's first step."""
    pool, called = cluster.pools["decode-small"], asyncio.Event()
    monkeypatch.setattr(pool, "on_point", lambda point, replica_id: called.set())
    monkeypatch.setattr(pool, "swallows", when == "held")
    answer = await cluster.ask(prompt(1200 if when == "prefilling" else 300), max_tokens=400)
    if when == "prefilling":
        await until(lambda: _runs(cluster, PREFILL))
    elif when == "decoding":
        await answer.has(3)
    else:
        await asyncio.wait_for(called.wait(), 60)
    if when == "held":
        monkeypatch.undo()
        assert (await cluster.used())[0] >= 3
    await cluster.core.abort_requests_async([answer.request_id])
    monkeypatch.undo()
    await cluster.all_is_free()
    assert answer.reason is None


async def _runs(cluster: RealEngines, replica_id: str) -> bool:
    return bool((await cluster.manager.ask(Status()))["replicas"][replica_id]["sessions"])
