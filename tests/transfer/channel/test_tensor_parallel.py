"""Handoffs between replicas of unlike tensor parallelism: each decode worker gets its heads from their holders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from transfer.channel.channel import Channel
from transfer.channel.layers import Chunk
from transfer.channel.outbox import Results
from transfer.control.messages import Seal
from transfer.memory.heads import head_range
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.layout import KVLayout

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_BYTES = 3, 32, 4, 8, 16
KEY, PROMPT = ("session", 1), 10
SOURCE, TARGET = [5, 6, 9], [20, 3, 4]
SPLITS = [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2), (4, 1)]


class Worker:
    """One worker of a replica: memory of `[layer, block, head, bytes]`, its heads only."""

    def __init__(self, name: str, rank: int, workers: int, heads_first: bool = True) -> None:
        self.heads = head_range(rank, workers, HEADS)
        self.memory = np.zeros((LAYERS, BLOCKS, len(self.heads), HEAD_BYTES), dtype=np.uint8)
        bases = tuple(int(self.memory[layer].ctypes.data) for layer in range(LAYERS))
        layout = KVLayout(
            num_layers=LAYERS,
            regions_per_layer=1,
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            block_bytes=len(self.heads) * HEAD_BYTES,
            bases=bases,
            rank=rank,
            workers=workers,
            total_heads=HEADS,
            heads_first=heads_first,
        )
        plane = InProcessPlane(f"{name}-{rank}-{id(self)}")
        self.channel = Channel(plane, layout, Seal("secret"), "127.0.0.1", 10.0)
        self.results = Results()

    def collect(self) -> Results:
        new = self.channel.take_results()
        self.results.received |= new.received
        self.results.broken |= new.broken
        self.results.released |= new.released
        return self.results


Replica = list[Worker]


@pytest.fixture
def make_replica() -> Iterator[Callable[..., Replica]]:
    made: list[Worker] = []

    def make(name: str, workers: int, **options: Any) -> Replica:
        replica = [Worker(name, rank, workers, **options) for rank in range(workers)]
        made.extend(replica)
        return replica

    yield make
    for worker in reversed(made):
        worker.channel.close()


def addresses(replica: Replica) -> list[str]:
    return [worker.channel.address for worker in replica]


def offer(decode: Replica, prefill: Replica) -> None:
    for worker in decode:
        worker.channel.offer(KEY, "d", addresses(prefill), 0, TARGET, False)


def save(prefill: Replica, computed: int, readers: int, layers: int = LAYERS) -> None:
    for worker in prefill:
        worker.channel.begin_step([Chunk(KEY, "p", computed, PROMPT, tuple(SOURCE), readers)])
        for layer in range(layers):
            worker.channel.layer_saved(layer)
        worker.channel.end_step()


def everywhere(replica: Replica, kind: str, request_id: str) -> Any:
    return lambda: all(request_id in getattr(worker.collect(), kind) for worker in replica)


@pytest.mark.parametrize(("prefills", "decodes"), SPLITS, ids=lambda size: str(size))
@pytest.mark.parametrize("is_early", [True, False], ids=["offered first", "offered last"])
def test_every_head_arrives_where_it_belongs(
    make_replica: Callable[..., Replica], until: Callable[..., Any], prefills: int, decodes: int, is_early: bool
) -> None:
    prefill, decode = make_replica("prefill", prefills), make_replica("decode", decodes)
    whole = np.random.default_rng(1).integers(1, 256, (LAYERS, len(SOURCE), HEADS, HEAD_BYTES), dtype=np.uint8)
    for worker in prefill:
        worker.memory[:, SOURCE] = whole[:, :, list(worker.heads)]
    if is_early:
        offer(decode, prefill)
    save(prefill, 7, decodes)
    save(prefill, PROMPT, decodes)
    for worker in prefill:
        worker.channel.ended(KEY, "p", True, decodes)
    if not is_early:
        offer(decode, prefill)
    until(everywhere(decode, "received", "d"))
    until(everywhere(prefill, "released", "p"))
    for worker in decode:
        assert np.array_equal(worker.memory[:, TARGET], whole[:, :, list(worker.heads)])
        others = [block for block in range(BLOCKS) if block not in TARGET]
        assert not worker.memory[:, others].any()
    moved = sum(worker.channel.counters()["bytes_written"] for worker in prefill)
    assert moved == whole.nbytes


@pytest.mark.parametrize(("prefills", "decodes"), SPLITS, ids=lambda size: str(size))
def test_a_cancel_is_fenced_by_every_worker(
    make_replica: Callable[..., Replica], until: Callable[..., Any], prefills: int, decodes: int
) -> None:
    prefill, decode = make_replica("prefill", prefills), make_replica("decode", decodes)
    offer(decode, prefill)
    save(prefill, 7, decodes)
    for worker in decode:
        worker.channel.cancel(KEY, "aborted")
    until(everywhere(decode, "broken", "d"))
    for worker in prefill:
        worker.channel.ended(KEY, "p", False, decodes)
    until(everywhere(prefill, "released", "p"))
    for worker in [*prefill, *decode]:
        counters = worker.channel.counters()
        assert not counters["open_receiving"]
        assert not counters["open_writing"]


def test_one_source_lost_stops_the_others(make_replica: Callable[..., Replica], until: Callable[..., Any]) -> None:
    prefill, decode = make_replica("prefill", 2), make_replica("decode", 1)
    offer(decode, prefill)
    until(lambda: all(worker.channel.is_answered(KEY, 1) for worker in prefill))
    save(prefill[1:], 7, 1)
    prefill[0].channel.close()
    until(everywhere(decode, "broken", "d"))
    assert "lost" in decode[0].results.broken["d"]
    prefill[1].channel.ended(KEY, "p", False, 1)
    until(everywhere(prefill[1:], "released", "p"))


def test_heads_inside_tokens_cannot_be_split(make_replica: Callable[..., Replica], until: Callable[..., Any]) -> None:
    prefill, decode = make_replica("prefill", 2, heads_first=False), make_replica("decode", 1, heads_first=False)
    offer(decode, prefill)
    until(everywhere(decode, "broken", "d"))
    assert "tensor parallelism" in decode[0].results.broken["d"]
