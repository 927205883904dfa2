"""The plane that copies within one process: which memory it writes, and which peers it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.layout import KVLayout
from transfer.memory.plane import PlaneError, WriteState

LAYERS, REGIONS, BLOCKS, HEAD_BYTES, HEADS = 2, 2, 4, 8, 2


class Worker:
    def __init__(self, name: str, rank: int = 0, workers: int = 1, stages: tuple[int, ...] = ()) -> None:
        block_bytes = HEAD_BYTES * HEADS // (workers // max(1, len(stages)))
        layers = stages[rank] if stages else LAYERS
        self.memory = np.zeros((layers, REGIONS, BLOCKS, block_bytes), dtype=np.uint8)
        base, region = int(self.memory.ctypes.data), BLOCKS * block_bytes
        bases = tuple(base + index * region for index in range(layers * REGIONS))
        self.layout = KVLayout(
            layers,
            REGIONS,
            BLOCKS,
            4,
            block_bytes,
            bases,
            rank=rank,
            workers=workers,
            total_heads=HEADS,
            stages=stages,
        )
        self.plane = InProcessPlane(name)
        self.plane.register(self.layout)

    def connect(self, peer: Worker) -> None:
        self.plane.connect(peer.plane.name, peer.plane.metadata(), peer.layout)


@pytest.fixture
def make() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def worker(name: str, **options: Any) -> Worker:
        made.append(Worker(name, **options))
        return made[-1]

    yield worker
    for each in made:
        each.plane.close()


def test_the_blocks_of_one_layer_are_copied_in_all_its_regions_and_nowhere_else(make: Callable[..., Worker]) -> None:
    prefill, decode = make("prefill"), make("decode")
    prefill.memory[:] = np.random.default_rng(1).integers(1, 256, prefill.memory.shape, dtype=np.uint8)
    prefill.connect(decode)
    state = prefill.plane.write("decode", 1, [0, 3], [2, 1])
    assert prefill.plane.check(state) is WriteState.DONE
    assert np.array_equal(decode.memory[1][:, [2, 1]], prefill.memory[1][:, [0, 3]])
    assert not decode.memory[0].any()
    assert not decode.memory[1][:, [0, 3]].any()


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_heads_in_common_are_copied(make: Callable[..., Worker], rank: int) -> None:
    whole, part = make("whole"), make("part", rank=rank, workers=2)
    mine = slice(rank * HEAD_BYTES, (rank + 1) * HEAD_BYTES)
    whole.memory[:] = np.random.default_rng(1).integers(1, 256, whole.memory.shape, dtype=np.uint8)
    whole.connect(part)
    whole.plane.write("part", 0, [1], [2])
    assert np.array_equal(part.memory[0, :, 2], whole.memory[0, :, 1, mine])
    whole.memory[:] = 0
    part.connect(whole)
    part.plane.write("whole", 0, [2], [3])
    assert np.array_equal(whole.memory[0, :, 3, mine], part.memory[0, :, 2])
    assert np.count_nonzero(whole.memory) == REGIONS * HEAD_BYTES


def test_a_layer_goes_to_where_the_other_stage_has_it(make: Callable[..., Worker]) -> None:
    whole, last = make("whole"), make("last", rank=1, workers=2, stages=(1, 1))
    whole.memory[:] = np.random.default_rng(1).integers(1, 256, whole.memory.shape, dtype=np.uint8)
    whole.connect(last)
    whole.plane.write("last", 1, [1], [2])
    assert np.array_equal(last.memory[0, :, 2], whole.memory[1, :, 1])
    whole.memory[:] = 0
    last.connect(whole)
    last.plane.write("whole", 1, [2], [3])
    assert np.array_equal(whole.memory[1, :, 3], last.memory[0, :, 2])
    assert not whole.memory[0].any()


def test_a_peer_in_another_process_or_with_other_memory_is_refused(make: Callable[..., Worker]) -> None:
    prefill, decode = make("prefill"), make("decode")
    with pytest.raises(PlaneError, match="its own process only"):
        prefill.plane.connect("decode", b"0", decode.layout)
    with pytest.raises(PlaneError, match="registered no such memory"):
        prefill.plane.connect("decode", decode.plane.metadata(), dataclasses.replace(decode.layout, num_blocks=3))
    with pytest.raises(PlaneError, match="no connection to decode"):
        prefill.plane.write("decode", 0, [0], [0])


def test_a_peer_that_was_disconnected_is_not_written(make: Callable[..., Worker]) -> None:
    prefill, decode = make("prefill"), make("decode")
    prefill.connect(decode)
    prefill.plane.disconnect("decode")
    prefill.plane.disconnect("decode")
    with pytest.raises(PlaneError, match="no connection to decode"):
        prefill.plane.write("decode", 0, [0], [0])


def test_the_memory_of_a_closed_plane_is_not_written(make: Callable[..., Worker]) -> None:
    prefill, decode = make("prefill"), make("decode")
    prefill.memory[:] = 1
    prefill.connect(decode)
    decode.plane.close()
    decode.plane.close()
    assert prefill.plane.write("decode", 0, [0], [0]) is WriteState.FAILED
    assert not decode.memory.any()
    with pytest.raises(PlaneError, match="registered no such memory"):
        prefill.connect(decode)
