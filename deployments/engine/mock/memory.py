"""The mock engine's KV cache: real bytes in real blocks, so that a move of wrong blocks changes the answer.

The KV of a token in a layer is 8 bytes: a hash of the seed, the layer and every token up to this one. The next
token is computed from the KV of all layers, never from the token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transfer.memory.layout import KVLayout

Words = NDArray[np.uint64]
KV_BYTES = 8  # per token and layer
FIRST_TOKEN, LAST_TOKEN = 10, 49_152  # above the usual special tokens, within the vocabulary of SmolLM2


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64: every bit of a word changes about half of the bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class MockMemory:
    """`num_layers` layers of `num_blocks` blocks of `block_size` tokens, all zero."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, seed: int) -> None:
        self._block_size = block_size
        self._words: Words = np.zeros((num_layers, num_blocks, block_size), dtype=np.uint64)
        self._flat: Words = self._words.reshape(num_layers, -1)
        self._salts = _mix(np.arange(1, num_layers + 1, dtype=np.uint64) + np.uint64(seed % 2**32 << 16))
        self._weights = _mix(np.arange(1, num_blocks * block_size + 1, dtype=np.uint64)) | np.uint64(1)

    def layout(self, facts: dict[str, str]) -> KVLayout:
        """Where the blocks lie, for the channel."""
        layers, blocks, _ = self._words.shape
        block_bytes = self._block_size * KV_BYTES
        base = int(self._words.ctypes.data)
        bases = tuple(base + layer * blocks * block_bytes for layer in range(layers))
        return KVLayout(layers, 1, blocks, self._block_size, block_bytes, bases, facts=facts)

    def scrub(self, blocks: Sequence[int]) -> None:
        """Erase newly allocated blocks, so that old KV cannot pass for KV that never arrived."""
        self._words[:, list(blocks)] = 0

    def slots(self, blocks: Sequence[int], begin: int, end: int) -> NDArray[np.int64]:
        """The places in a layer of the tokens at positions `begin` to `end` of a request that holds `blocks`."""
        positions = np.arange(begin, end)
        starts = np.asarray(blocks, dtype=np.int64) * self._block_size
        slots: NDArray[np.int64] = starts[positions // self._block_size] + positions % self._block_size
        return slots

    def prefix_hashes(self, chain: int, tokens: Sequence[int], begin: int) -> Words:
        """Hashes of all prefixes that end in one of `tokens`, the first at position `begin`.

        `chain` is the last hash before them, 0 at the start.
        """
        words = np.array(tokens, dtype=np.uint64) << np.uint64(32)
        words += np.arange(begin, begin + len(tokens), dtype=np.uint64)
        return np.cumsum(_mix(words), dtype=np.uint64) + np.uint64(chain)

    def write(self, layer: int, slots: NDArray[np.int64], hashes: Words) -> None:
        """Compute and write a layer's KV of the tokens with these prefix hashes."""
        self._flat[layer, slots] = _mix(hashes ^ self._salts[layer])

    def next_token(self, blocks: Sequence[int], tokens: int, seed: int) -> int:
        """The token that follows `tokens` tokens, computed from all of their KV. `seed`: the request's own."""
        layers = self._words.shape[0]
        kept = list(blocks[: -(-tokens // self._block_size)])
        kv = self._words[:, kept].reshape(layers, -1)[:, :tokens]
        sums = _mix((kv @ self._weights[:tokens]) ^ self._salts)
        checksum = int(_mix(sums[::-1].cumsum(dtype=np.uint64)).sum(dtype=np.uint64))
        word = np.array([(checksum + tokens * 0x9E3779B97F4A7C15 + seed) % 2**64], dtype=np.uint64)
        return FIRST_TOKEN + int(_mix(word)[0] % np.uint64(LAST_TOKEN - FIRST_TOKEN))
