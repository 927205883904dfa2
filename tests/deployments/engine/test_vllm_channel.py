"""Our channel between real engines of unlike shape: tensor parallelism, block sizes, fp8 KV, a small prefill memory.

The model is tiny and random, with heads enough to be split four ways.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import BatonConfig, ModelConfig, PlacementConfig, PoolConfig, VllmEngineConfig
from deployments.engine.build import environment
from deployments.messages import Mode
from load_tests.control_plane import PREFILL, SMALL
from tests.deployments.real_engines import RealEngines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LAYERS, HEADS, HEAD_DIM, VOCABULARY, MAX_MODEL_LEN = 3, 4, 64, 1024, 1024
FLOAT32 = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2 * HEADS * HEAD_DIM,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=LAYERS,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def pool(tensor_parallel_size: int = 1, engine_args: dict[str, Any] | None = None, **engine: Any) -> PoolConfig:
    settings = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 64, "block_size": 32, **engine}
    return PoolConfig(
        engine=VllmEngineConfig(
            tensor_parallel_size=tensor_parallel_size,
            engine_args={"skip_tokenizer_init": True, **(engine_args or {})},
            **settings,
        )
    )


@asynccontextmanager
async def cluster(model: Path, prefill: PoolConfig, decode: PoolConfig) -> AsyncIterator[RealEngines]:
    config = BatonConfig(
        model=ModelConfig(source=str(model), dtype="float32", max_model_len=MAX_MODEL_LEN),
        prefill=prefill,
        decode={"small": decode},
        placement=PlacementConfig(snapshot_interval_s=0.01),
    )
    os.environ.update(environment(config, "prefill"))
    made = RealEngines(config)
    try:
        await made.start(PREFILL, SMALL)
        yield made
    finally:
        await made.close()


_random = random.Random(5)


def prompt(tokens: int) -> list[int]:
    return [_random.randrange(10, VOCABULARY) for _ in range(tokens)]


async def check(engines: RealEngines, lengths: list[int], block_size: int, itemsize: int = FLOAT32) -> None:
    """Split answers equal those of decode alone, and every block moved once, heads and all."""
    before = await engines.replicas[PREFILL].counters()
    prompts = [prompt(tokens) for tokens in lengths]
    asked = [await engines.ask(each, max_tokens=6) for each in prompts]
    for each, answer in zip(prompts, asked, strict=True):
        tokens = (await answer.over()).tokens
        assert answer.context.modes == {Mode.DISAGGREGATED}
        assert len(tokens) == 6
        assert tokens == await engines.alone(each, max_tokens=6)
    after = await engines.replicas[PREFILL].counters()
    blocks = sum(-(-tokens // block_size) for tokens in lengths)
    expected = blocks * block_size * LAYERS * HEADS * 2 * HEAD_DIM * itemsize
    assert after["bytes_written"] - before["bytes_written"] == expected
    cancelled = await engines.ask(prompt(500), max_tokens=300)
    await cancelled.has(2)
    await engines.core.abort_requests_async([cancelled.request_id])
    await engines.all_is_free()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4)], ids=["1 to 2", "2 to 1", "2 to 4"])
async def test_heads_are_split_on_the_way(model: Path, prefill: int, decode: int) -> None:
    async with cluster(model, pool(prefill), pool(decode)) as engines:
        await check(engines, [2, 33, 64, 200], block_size=32)


@pytest.mark.parametrize(("block_size", "chunk"), [(32, 48), (256, 100)])
async def test_any_block_size_and_chunk(model: Path, block_size: int, chunk: int) -> None:
    shape = pool(block_size=block_size, max_num_batched_tokens=chunk)
    async with cluster(model, shape, shape) as engines:
        await check(engines, [1, 15, 16, 17, 255, 256, 300], block_size)


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's fp8 KV on CPU needs AVX-512")
async def test_fp8_kv_when_both_sides_have_it(model: Path) -> None:
    shape = pool(engine_args={"kv_cache_dtype": "fp8"})
    async with cluster(model, shape, shape) as engines:
        await check(engines, [33, 200], block_size=32, itemsize=1)


SAMPLING: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"min_tokens": 6, "stop_token_ids": list(range(VOCABULARY // 2))},
    {"min_tokens": 2, "stop_token_ids": list(range(0, VOCABULARY, 3))},
    {"logit_bias": {100: 50.0, 101: 49.5}},
    {"repetition_penalty": 1.8},
    {"top_k": 1, "temperature": 0.9},
    {"allowed_token_ids": [7, 8, 9, 10]},
]


async def test_whatever_is_split_is_exact(model: Path) -> None:
    """Tokens, log probabilities and the reason of the end: those of one engine."""
    async with cluster(model, pool(), pool()) as engines:
        for sampling in SAMPLING:
            asked = prompt(70)
            split, alone = [
                await engines.answer(asked, max_tokens=12, **{**sampling, **mode})
                for mode in ({}, {"prompt_logprobs": 0})
            ]
            assert split.context.modes == {Mode.DISAGGREGATED}, sampling
            assert alone.context.modes == {Mode.DECODE_LOCAL}
            assert (split.tokens, split.reason, split.stop_reason) == (alone.tokens, alone.reason, alone.stop_reason)
            assert len(split.tokens) > 1, sampling
            for one, other in zip(logprobs(split), logprobs(alone), strict=True):
                assert one == pytest.approx(other, abs=1e-4)


def logprobs(answer: Any) -> list[list[float]]:
    """Of each token of an answer: those of the token itself and of the likeliest."""
    rows = [output.new_logprobs for output in answer.outputs if output.new_logprobs is not None]
    return [list(row) for each in rows for row in each.logprobs]
