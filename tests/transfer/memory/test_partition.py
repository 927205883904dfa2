"""How workers split the KV: every head of every layer comes from exactly one worker; endpoints tell the partition."""

from __future__ import annotations

import pytest

from transfer.memory.heads import head_range
from transfer.memory.partition import Partition, address_of, endpoint_of, overlap, partition_of, readers, sources

LAYERS = 6
STAGES: list[tuple[int, ...]] = [(), (3, 3), (1, 5), (5, 1), (2, 2, 2), (1, 1, 1, 1, 1, 1)]
PARTITIONS = [Partition(tensor, stages) for tensor in (1, 2, 4) for stages in STAGES]


def held(partition: Partition, rank: int, total_heads: int) -> set[tuple[int, int]]:
    """The layers and heads of a worker."""
    heads = head_range(rank % partition.tensor, partition.tensor, total_heads)
    return {(layer, head) for layer in partition.layers(rank) or range(LAYERS) for head in heads}


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_all_layers_are_held_in_order(partition: Partition) -> None:
    first_of_each_stage = range(0, partition.workers, partition.tensor)
    found = [layer for rank in first_of_each_stage for layer in partition.layers(rank) or range(LAYERS)]
    assert found == list(range(LAYERS))
    assert all(
        partition.layers(rank) == partition.layers(rank - rank % partition.tensor) for rank in range(partition.workers)
    )


PAIRS = [(one, other) for one in PARTITIONS for other in PARTITIONS]


@pytest.mark.parametrize("total_heads", [1, 2, 8])
def test_each_head_of_each_layer_comes_once(total_heads: int) -> None:
    for prefill, decode in PAIRS:
        for rank in range(decode.workers):
            wanted = held(decode, rank, total_heads)
            asked = sources(rank, decode, prefill, total_heads)
            taken = [part for peer in asked for part in held(prefill, peer, total_heads)]
            assert sorted(part for part in taken if part in wanted) == sorted(wanted), (prefill, decode)


@pytest.mark.parametrize("total_heads", [1, 8])
def test_readers_are_those_whose_source_we_are(total_heads: int) -> None:
    for prefill, decode in PAIRS:
        for rank in range(prefill.workers):
            mine = [peer for peer in range(decode.workers) if rank in sources(peer, decode, prefill, total_heads)]
            assert list(readers(rank, prefill, decode, total_heads)) == mine, (prefill, decode)


def test_two_stages_to_one_and_back() -> None:
    one, two = Partition(), Partition(1, (3, 3))
    assert sources(0, one, two, 8) == (0, 1)
    assert [sources(rank, two, one, 8) for rank in range(2)] == [(0,), (0,)]
    assert [sources(rank, two, two, 8) for rank in range(2)] == [(0,), (1,)]


def test_stages_of_another_model_may_have_no_layer_in_common() -> None:
    assert sources(1, Partition(1, (4, 4)), Partition(1, (2, 2)), 8) == ()
    assert readers(1, Partition(1, (4, 4)), Partition(1, (2, 2)), 8) == ()


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (None, None, None),
        (None, range(1, 3), range(1, 3)),
        (range(1, 3), None, range(1, 3)),
        (range(0, 3), range(2, 6), range(2, 3)),
        (range(2, 6), range(0, 3), range(2, 3)),
    ],
    ids=str,
)
def test_what_two_workers_share(one: range | None, other: range | None, both: range | None) -> None:
    assert overlap(one, other) == both


def test_workers_without_a_layer_in_common_share_nothing() -> None:
    assert not overlap(range(0, 3), range(3, 6))
    assert not overlap(range(3, 6), range(0, 2))


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_endpoints_tell_the_partition(partition: Partition) -> None:
    addresses = [f"tcp://[::1]:{4000 + rank}" for rank in range(partition.workers)]
    endpoints = [
        endpoint_of(address, partition.layers(rank) or range(LAYERS), LAYERS) for rank, address in enumerate(addresses)
    ]
    assert partition_of(endpoints) == partition
    assert [address_of(endpoint) for endpoint in endpoints] == addresses
    assert (endpoints == addresses) is not bool(partition.stages)


@pytest.mark.parametrize(
    "layers",
    [
        ["0:3", ""],
        ["1:3", "3:6"],
        ["0:3", "4:6"],
        ["0:3", "2:6"],
        ["3:6", "0:3"],
        ["0:3", "3:6", "0:3", "3:6"],
        ["0:3", "0:3", "3:6"],
        ["0:0", "0:6"],
        ["0:3", "3:" + "9" * 50],
        ["0:3", "x"],
    ],
    ids=str,
)
def test_endpoints_that_fit_no_partition_are_taken_for_one_stage(layers: list[str]) -> None:
    endpoints = [f"tcp://host:{port}" + (f"#layers={each}" if each else "") for port, each in enumerate(layers)]
    assert partition_of(endpoints) == Partition(len(layers))


def test_no_endpoints_are_no_workers() -> None:
    assert partition_of([]).workers == 0
    assert sources(0, Partition(), partition_of([]), 8) == ()
