"""Handoffs between replicas that split the KV in other ways: each worker gets its heads of its layers from holders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.transfer.channel.wire_peer import Peer
from tests.transfer.channel.wire_peer import offer as offer_of
from transfer.channel.channel import Channel
from transfer.channel.decode_side import NO_SOURCE
from transfer.channel.layers import Chunk
from transfer.channel.outbox import Results
from transfer.control.messages import Failed, Seal, Welcome
from transfer.memory.heads import head_range
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.layout import KVLayout
from transfer.memory.partition import Partition

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_BYTES = 3, 32, 4, 8, 16
KEY, PROMPT = ("session", 1), 10
SOURCE, TARGET = [5, 6, 9], [20, 3, 4]
HEAD_PARTITIONS = [
    (Partition(one), Partition(other)) for one, other in [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2), (4, 1)]
]
FRONT, BACK, EACH = (2, 1), (1, 2), (1, 1, 1)
LAYER_PARTITIONS = [
    (Partition(), Partition(1, FRONT)),
    (Partition(1, FRONT), Partition()),
    (Partition(1, FRONT), Partition(1, FRONT)),
    (Partition(1, FRONT), Partition(1, BACK)),
    (Partition(1, EACH), Partition(1, BACK)),
    (Partition(1, BACK), Partition(1, EACH)),
]
BOTH_PARTITIONS = [
    (Partition(2), Partition(1, BACK)),
    (Partition(1, BACK), Partition(2)),
    (Partition(2, FRONT), Partition()),
    (Partition(), Partition(2, FRONT)),
    (Partition(2, FRONT), Partition(4, BACK)),
    (Partition(4, EACH), Partition(2, BACK)),
]
PARTITIONS = [*HEAD_PARTITIONS, *LAYER_PARTITIONS, *BOTH_PARTITIONS]


class Worker:
    """One worker of a replica: memory of `[layer, block, head, bytes]`, its heads of its layers only."""

    def __init__(self, name: str, rank: int, partition: Partition, heads_first: bool = True) -> None:
        self.heads = head_range(rank % partition.tensor, partition.tensor, HEADS)
        self.layers = partition.layers(rank) or range(LAYERS)
        self.memory = np.zeros((len(self.layers), BLOCKS, len(self.heads), HEAD_BYTES), dtype=np.uint8)
        layout = KVLayout(
            num_layers=len(self.layers),
            regions_per_layer=1,
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            block_bytes=len(self.heads) * HEAD_BYTES,
            bases=tuple(int(layer.ctypes.data) for layer in self.memory),
            rank=rank,
            workers=partition.workers,
            total_heads=HEADS,
            heads_first=heads_first,
            stages=partition.stages,
        )
        plane = InProcessPlane(f"{name}-{rank}-{id(self)}")
        self.channel = Channel(plane, layout, Seal("secret"), "127.0.0.1", 10.0)
        self.results = Results()

    def part(self, whole: np.ndarray) -> np.ndarray:
        """Of whole blocks, what this worker holds."""
        return whole[list(self.layers)][:, :, list(self.heads)]

    def collect(self) -> Results:
        new = self.channel.take_results()
        self.results.received |= new.received
        self.results.broken |= new.broken
        self.results.released |= new.released
        self.results.fetched |= new.fetched
        return self.results


Replica = list[Worker]


@pytest.fixture
def make_replica() -> Iterator[Callable[..., Replica]]:
    made: list[Worker] = []

    def make(name: str, partition: Partition, **options: Any) -> Replica:
        replica = [Worker(name, rank, partition, **options) for rank in range(partition.workers)]
        made.extend(replica)
        return replica

    yield make
    for worker in reversed(made):
        worker.channel.close()


def endpoints(replica: Replica) -> list[str]:
    return [worker.channel.address for worker in replica]


def offer(decode: Replica, prefill: Replica) -> None:
    for worker in decode:
        worker.channel.offer(KEY, "d", endpoints(prefill), 0, TARGET, False)


def save(prefill: Replica, computed: int, readers: Partition) -> None:
    for worker in prefill:
        worker.channel.begin_step([Chunk(KEY, "p", computed, PROMPT, tuple(SOURCE), readers)])
        for layer in worker.layers:
            worker.channel.layer_saved(layer)
        worker.channel.end_step()


def everywhere(replica: Replica, kind: str, request_id: str) -> Any:
    return lambda: all(request_id in getattr(worker.collect(), kind) for worker in replica)


def nothing_is_open(*replicas: Replica) -> bool:
    counters = [worker.channel.counters() for replica in replicas for worker in replica]
    return not any(each["open_receiving"] or each["open_writing"] for each in counters)


@pytest.mark.parametrize(("prefills", "decodes"), PARTITIONS, ids=str)
@pytest.mark.parametrize("is_early", [True, False], ids=["offered first", "offered last"])
def test_every_head_of_every_layer_arrives_where_it_belongs(
    make_replica: Callable[..., Replica],
    until: Callable[..., Any],
    prefills: Partition,
    decodes: Partition,
    is_early: bool,
) -> None:
    prefill, decode = make_replica("prefill", prefills), make_replica("decode", decodes)
    whole = np.random.default_rng(1).integers(1, 256, (LAYERS, len(SOURCE), HEADS, HEAD_BYTES), dtype=np.uint8)
    for worker in prefill:
        worker.memory[:, SOURCE] = worker.part(whole)
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
        assert np.array_equal(worker.memory[:, TARGET], worker.part(whole))
        others = [block for block in range(BLOCKS) if block not in TARGET]
        assert not worker.memory[:, others].any()
    moved = sum(worker.channel.counters()["bytes_written"] for worker in prefill)
    assert moved == whole.nbytes
    assert nothing_is_open(prefill, decode)


@pytest.mark.parametrize(("prefills", "decodes"), PARTITIONS, ids=str)
def test_a_cancel_is_fenced_by_every_worker(
    make_replica: Callable[..., Replica], until: Callable[..., Any], prefills: Partition, decodes: Partition
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
    assert nothing_is_open(prefill, decode)


@pytest.mark.parametrize("prefills", [Partition(2), Partition(1, FRONT)], ids=str)
def test_one_source_lost_stops_the_others(
    make_replica: Callable[..., Replica], until: Callable[..., Any], prefills: Partition
) -> None:
    prefill, decode = make_replica("prefill", prefills), make_replica("decode", Partition())
    offer(decode, prefill)
    until(lambda: all(worker.channel.is_answered(KEY) for worker in prefill))
    save(prefill[1:], 7, Partition())
    prefill[0].channel.close()
    until(everywhere(decode, "broken", "d"))
    assert "lost" in decode[0].results.broken["d"]
    prefill[1].channel.ended(KEY, "p", False)
    until(everywhere(prefill[1:], "released", "p"))
    assert nothing_is_open(prefill[1:], decode)


def test_a_prefill_stage_that_is_lost_breaks_the_stages_of_decode_that_need_it_and_no_other(
    make_replica: Callable[..., Replica], until: Callable[..., Any]
) -> None:
    """The engine of decode waits for all of its workers, and then has a handoff that is broken."""
    prefill, decode = make_replica("prefill", Partition(1, BACK)), make_replica("decode", Partition(1, BACK))
    offer(decode, prefill)
    until(lambda: all(worker.channel.is_answered(KEY, Partition(1, BACK)) for worker in prefill))
    prefill[1].channel.close()
    save(prefill[:1], PROMPT, Partition(1, BACK))
    until(everywhere(decode[:1], "received", "d"))
    until(everywhere(decode[1:], "broken", "d"))
    prefill[0].channel.ended(KEY, "p", True, Partition(1, BACK))
    until(everywhere(prefill[:1], "released", "p"))
    assert nothing_is_open(prefill[:1], decode)


@pytest.mark.parametrize("prefills", [Partition(), Partition(1, FRONT)], ids=str)
def test_a_decode_stage_that_is_lost_holds_no_source(
    make_replica: Callable[..., Replica], until: Callable[..., Any], prefills: Partition
) -> None:
    prefill, decode = make_replica("prefill", prefills), make_replica("decode", Partition(1, BACK))
    offer(decode, prefill)
    until(lambda: all(worker.channel.is_answered(KEY, Partition(1, BACK)) for worker in prefill))
    decode[1].channel.close()
    save(prefill, PROMPT, Partition(1, BACK))
    for worker in prefill:
        worker.channel.ended(KEY, "p", True, Partition(1, BACK))
    until(everywhere(prefill, "released", "p"))
    until(everywhere(decode[:1], "received", "d"))
    assert not decode[1].memory.any()
    assert nothing_is_open(prefill, decode[:1])


def test_heads_inside_tokens_cannot_be_split(make_replica: Callable[..., Replica], until: Callable[..., Any]) -> None:
    prefill = make_replica("prefill", Partition(2), heads_first=False)
    decode = make_replica("decode", Partition(), heads_first=False)
    offer(decode, prefill)
    until(everywhere(decode, "broken", "d"))
    assert "tensor parallelism" in decode[0].results.broken["d"]


def test_heads_inside_tokens_do_not_matter_where_layers_are_split(
    make_replica: Callable[..., Replica], until: Callable[..., Any]
) -> None:
    prefill = make_replica("prefill", Partition(1, BACK), heads_first=False)
    decode = make_replica("decode", Partition(), heads_first=False)
    offer(decode, prefill)
    save(prefill, PROMPT, Partition())
    until(everywhere(decode, "received", "d"))


@pytest.mark.parametrize(
    ("prefills", "reason"),
    [(Partition(1, (1, 1)), NO_SOURCE), (Partition(1, (3, 2)), NO_SOURCE), (Partition(), None)],
    ids=str,
)
def test_replicas_of_models_of_other_depth_refuse_each_other(
    make_replica: Callable[..., Replica], until: Callable[..., Any], prefills: Partition, reason: str | None
) -> None:
    """Also where the endpoints alone tell, before any message."""
    prefill, decode = make_replica("prefill", prefills), make_replica("decode", Partition(1, (1, 3)))
    offer(decode, prefill)
    until(everywhere(decode, "broken", "d"))
    expected = reason or "total_layers differs: 3 here, 4 there"
    assert {worker.results.broken["d"] for worker in decode} == {expected}
    for worker in decode:
        worker.channel.fetch(("fetch", 1), "f", endpoints(prefill), TARGET, [b"1", b"2", b"3"], 10.0)
    until(everywhere(decode, "fetched", "f"))
    assert [worker.results.fetched for worker in decode] == [{"f": 0}] * 2
    assert nothing_is_open(prefill, decode)


def test_a_worker_with_other_layers_than_the_prefill_is_for_is_refused(prefill: Any) -> None:
    """What is written goes by the layout that the worker told, and by the partition that the prefill was told."""
    prefill.channel.begin_step([Chunk(KEY, "p", 4, 8, (5, 6), Partition(1, (2, 1)))])
    prefill.channel.layer_saved(0)
    prefill.barrier()
    peer = Peer(prefill.channel.address, prefill.layout, num_layers=1, workers=2, stages=(1, 2))
    try:
        assert peer.ask(peer.hello) == Welcome()
        answer = peer.ask(offer_of())
        assert isinstance(answer, Failed)
        assert answer.reason == "the worker has other layers than its endpoint says"
        assert not peer.memory.any()
    finally:
        peer.close()
