"""The sizes of a check's model and KV cache."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from transfer.check.shape import LEAST_BLOCKS, PRESETS, Shape, scattered

SHAPE = Shape(3, 64, 4, 2, 16, 4, 70, 32, "bfloat16")


def test_the_cache_holds_the_prompt_twice_and_has_its_least_number_of_blocks() -> None:
    assert (SHAPE.prompt_blocks, SHAPE.blocks) == (18, 36)
    assert replace(SHAPE, prompt_tokens=4).blocks == LEAST_BLOCKS
    assert SHAPE.layer_shape == (36, 2, 4, 32)


@pytest.mark.parametrize(("dtype", "element"), [("bfloat16", 2), ("float32", 4)])
def test_bytes_follow_the_dtype(dtype: str, element: int) -> None:
    shape = replace(SHAPE, dtype=dtype)
    assert shape.block_bytes == 2 * 4 * 32 * element
    assert shape.kv_bytes(5) == 5 * 3 * shape.block_bytes


@pytest.mark.parametrize(("tokens", "chunks"), [(70, [32, 64, 70]), (64, [32, 64]), (1, [1])])
def test_a_prompt_ends_with_its_last_chunk(tokens: int, chunks: list[int]) -> None:
    assert SHAPE.chunks(tokens) == chunks


def test_scattered_blocks_are_unlike_each_other_and_of_the_cache() -> None:
    blocks = scattered(SHAPE, 20, random.Random(1))
    assert len(set(blocks)) == 20
    assert set(blocks) <= set(range(SHAPE.blocks))
    assert blocks != sorted(blocks)
    assert len(scattered(SHAPE, SHAPE.blocks, random.Random(1))) == SHAPE.blocks


def test_every_preset_divides_into_its_heads() -> None:
    for shape in PRESETS.values():
        assert shape.heads * shape.head_dim == shape.hidden
        assert shape.heads % shape.kv_heads == 0
