"""The model and the KV cache that a check runs on."""

from __future__ import annotations

import random
from dataclasses import dataclass

from transfer.memory.blocks import blocks_for

LEAST_BLOCKS = 32  # enough for a sample of blocks to be scattered
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


class CheckFailed(Exception):
    """Bytes are wrong, a wait reached its deadline, or a side failed. The message says which."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer, its paged KV cache, and the prompt that it prefills in chunks. Sizes: in tokens and elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    prompt_tokens: int
    chunk_tokens: int
    dtype: str

    @property
    def prompt_blocks(self) -> int:
        """The number of blocks of the whole prompt."""
        return blocks_for(self.prompt_tokens, self.block_size)

    @property
    def blocks(self) -> int:
        """The number of blocks of the cache: twice the prompt's, so that some blocks must stay unchanged."""
        return max(2 * self.prompt_blocks, LEAST_BLOCKS)

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """The shape of one layer's cache tensor: blocks, heads, tokens, keys and values."""
        return self.blocks, self.kv_heads, self.block_size, 2 * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.kv_heads * self.block_size * 2 * self.head_dim * ELEMENT_BYTES[self.dtype]

    def kv_bytes(self, blocks: int) -> int:
        """Bytes of `blocks` blocks in all layers."""
        return blocks * self.layers * self.block_bytes

    def chunks(self, tokens: int) -> list[int]:
        """The number of tokens that are computed after each chunk of a prompt of `tokens` tokens."""
        return [min(end, tokens) for end in range(self.chunk_tokens, tokens + self.chunk_tokens, self.chunk_tokens)]


PRESETS = {
    "cuda": Shape(16, 2048, 16, 8, 128, 128, 8192, 2048, "bfloat16"),
    "cpu": Shape(8, 256, 8, 4, 32, 16, 2048, 512, "float32"),
}


def scattered(shape: Shape, count: int, chance: random.Random) -> list[int]:
    """`count` blocks from all over the cache, in no order."""
    return chance.sample(range(shape.blocks), count)
