"""Digests of blocks: which bytes they cover, and what is read at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from transfer.channel import digests
from transfer.channel.digests import BlockReader, DeviceRegions, WrittenBlocks, block_digest
from transfer.channel.fetched import FetchedBlocks, part_of
from transfer.control.handoff import Write
from transfer.memory.digest import digest_of
from transfer.memory.partition import Partition

BLOCKS, WINDOW = [9, 2, 40], (8, 16)


def reader_of(side: Any) -> BlockReader:
    return BlockReader(side.layout, {"fetch_digest_s": 0.0})


@pytest.fixture
def filled(decode: Any) -> Any:
    decode.memory[:] = np.random.default_rng(1).integers(0, 256, decode.memory.shape, dtype=np.uint8)
    return decode


def test_a_digest_covers_the_window_of_every_region_of_a_layer_and_nothing_else(filled: Any) -> None:
    reader = reader_of(filled)
    before = reader.digests(1, BLOCKS, WINDOW)
    parts = [[digest_of(filled.memory[1, region, block, 8:24].tobytes()) for region in (0, 1)] for block in BLOCKS]
    assert before == [b"".join(each) for each in parts]
    for place in ((1, 0, 9, 7), (1, 0, 9, 24), (0, 0, 9, 8), (2, 1, 9, 8), (1, 0, 8, 8)):
        filled.memory[place] ^= 1
        assert reader.digests(1, BLOCKS, WINDOW) == before, place
    for region, byte in ((0, 8), (1, 23)):
        filled.memory[1, region, 9, byte] ^= 1
        after = reader.digests(1, BLOCKS, WINDOW)
        assert (after[0] == before[0], after[1:]) == (False, before[1:])
        filled.memory[1, region, 9, byte] ^= 1


def test_tensors_have_the_same_bytes(filled: Any) -> None:
    """As memory of a GPU is read, on which this has not been run."""
    regions = [torch.from_numpy(filled.memory[layer, region]) for layer in range(3) for region in range(2)]
    device = DeviceRegions(regions, None)
    for layer in range(3):
        windows = [device.windows(2 * layer + region, BLOCKS, WINDOW) for region in range(2)]
        found = [b"".join(map(digest_of, each)) for each in zip(*windows, strict=True)]
        assert found == reader_of(filled).digests(layer, BLOCKS, WINDOW)


def test_the_time_is_counted(filled: Any) -> None:
    counts = {"fetch_digest_s": 0.0}
    BlockReader(filled.layout, counts).digests(0, BLOCKS, WINDOW)
    assert counts["fetch_digest_s"] > 0


@pytest.mark.parametrize(("piece_bytes", "blocks"), [(1, 1), (64, 1), (191, 2), (10**9, 10**9 // 64)])
def test_a_piece_is_a_block_or_as_many_as_fit(
    filled: Any, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, blocks: int
) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", piece_bytes)
    assert reader_of(filled).blocks_at_once(2, WINDOW) == blocks


def test_the_order_of_the_writes_does_not_matter(filled: Any) -> None:
    reader, layers = reader_of(filled), range(3)
    writes = [Write(layer, 0, tuple(blocks), ()) for layer in layers for blocks in (BLOCKS[:1], BLOCKS[1:])]
    found = []
    for order in (writes, writes[::-1]):
        written = WrittenBlocks(reader, layers, WINDOW, BLOCKS)
        for write in order:
            written.wrote(write)
        found.append(written.digests())
    expected = [block_digest(reader.digests(layer, [block], WINDOW)[0] for layer in layers) for block in BLOCKS]
    assert found == [tuple(expected)] * 2


def test_a_part_is_what_a_worker_of_that_rank_holds_too(make_side: Any) -> None:
    side = make_side("target", rank=1, workers=2, stages=(1, 2), total_heads=2)
    assert side.layout.layers == range(1, 3)
    part = part_of(side.layout, Partition(2, (2, 1)), 1)
    assert (part.layers, part.window) == (range(1, 2), (16, 16)), "the second head of the second layer"
    assert part_of(side.layout, Partition(), 0).window == (0, 32)


class Told:
    """A fetch of three blocks from one source that says what its digests are."""

    def __init__(self, side: Any, digests_of: list[bytes], found: int = 3) -> None:
        self.reader = reader_of(side)
        self.fetch = FetchedBlocks("r", side.layout, ["tcp://source"], BLOCKS, 0.0)
        self.fetch.found["tcp://source"] = found
        self.fetch.digests["tcp://source"] = tuple(digests_of)

    def looks(self) -> int:
        """How many pieces are compared until the last."""
        count = 1
        while not self.fetch.compare(self.reader):
            count += 1
        return count


def right(side: Any) -> list[bytes]:
    reader = reader_of(side)
    return [block_digest(reader.digests(layer, [block], (0, 32))[0] for layer in range(3)) for block in BLOCKS]


@pytest.mark.parametrize(("at_once", "looks"), [(1, 3), (2, 2), (3, 1), (9, 1)])
def test_pieces_are_compared_up_to_the_first_block_that_is_wrong(
    filled: Any, monkeypatch: pytest.MonkeyPatch, at_once: int, looks: int
) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", at_once * filled.layout.kv_bytes(1))
    whole = Told(filled, right(filled))
    assert (whole.looks(), whole.fetch.good, whole.fetch.is_corrupt) == (looks, 3, False)
    for wrong in range(3):
        told = right(filled)
        told[wrong] = bytes(16)
        bad = Told(filled, told)
        assert bad.looks() == wrong // at_once + 1
        assert (bad.fetch.good, bad.fetch.is_corrupt) == (wrong, True)


@pytest.mark.parametrize("count", range(3))
def test_a_block_without_a_digest_has_not_come(filled: Any, count: int) -> None:
    few = Told(filled, right(filled)[:count])
    few.looks()
    assert (few.fetch.good, few.fetch.is_corrupt) == (count, True)


def test_digests_of_blocks_that_were_not_asked_for_do_not_count(filled: Any) -> None:
    many = Told(filled, [*right(filled), bytes(16)], found=4)
    assert (many.fetch.came, many.looks(), many.fetch.good, many.fetch.is_corrupt) == (3, 1, 3, False)
