"""The figures of a check, and that a wrong block is seen."""

from __future__ import annotations

import numpy as np
import pytest

from transfer.check.figures import Pass, block_digests, gb_per_s, overlap, wrong_blocks


def caches() -> tuple[np.ndarray, np.ndarray]:
    """Two caches of 2 layers, 8 blocks and 64 bytes, with nothing in common."""
    made = np.random.default_rng(1).integers(0, 256, (2, 2, 8, 64), dtype=np.uint8)
    return made[0], made[1]


def test_what_was_sent_and_nothing_else_is_right() -> None:
    prefill, decode = caches()
    before, sent = block_digests(decode), block_digests(prefill)
    decode[:, [6, 0]] = prefill[:, [1, 2]]
    assert wrong_blocks(before, block_digests(decode), sent, [1, 2], [6, 0]) == []


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("block", [6, 3])
def test_one_corrupted_byte_is_seen_where_it_is(layer: int, block: int) -> None:
    prefill, decode = caches()
    before, sent = block_digests(decode), block_digests(prefill)
    decode[:, [6, 0]] = prefill[:, [1, 2]]
    decode[layer, block, 17] ^= 1
    assert wrong_blocks(before, block_digests(decode), sent, [1, 2], [6, 0]) == [block]


def test_blocks_that_never_came_or_were_swapped_are_seen() -> None:
    prefill, decode = caches()
    before, sent = block_digests(decode), block_digests(prefill)
    decode[:, [0, 6]] = prefill[:, [1, 2]]
    assert wrong_blocks(before, block_digests(decode), sent, [1, 2], [6, 0]) == [0, 6]
    assert wrong_blocks(before, before, sent, [1, 2], [6, 0]) == [0, 6]


def test_the_figures_of_passes_made_by_hand() -> None:
    half = Pass(0.0, 1.0, ((0.5, 100), (1.0, 100), (1.25, 200)))
    whole = Pass(10.0, 12.0, ((11.0, 400),))
    figures = overlap([half, whole], [1.5, 11.0], [Pass(0.0, 1.0), Pass(0.0, 1.0)])
    assert figures["overlap_share_range"] == [0.5, 1.0]
    assert figures["overlap_share"] == 0.75
    assert figures["tail_ms_range"] == [-1000.0, 500.0]
    assert figures["prefill_slowdown"] == 0.5
    assert figures["kv_bytes"] == half.size == 400
    assert half.write_s == 1.25
    assert gb_per_s(3 * 10**9, [1.0, 2.0, 3.0]) == 1.5
