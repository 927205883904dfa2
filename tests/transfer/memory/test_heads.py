"""Heads of tensor-parallel workers: every head of a decode worker comes from exactly one prefill worker."""

from __future__ import annotations

import pytest

from transfer.memory.heads import head_range, readers, sources

SIZES = [1, 2, 4, 8]


@pytest.mark.parametrize(("workers", "total"), [(1, 8), (2, 8), (4, 8), (8, 8), (4, 2), (8, 1), (3, 3)])
def test_all_heads_are_held_in_order(workers: int, total: int) -> None:
    held = [head_range(rank, workers, total) for rank in range(workers)]
    assert sorted({head for heads in held for head in heads}) == list(range(total))
    assert [heads.start for heads in held] == sorted(heads.start for heads in held)
    assert len({len(heads) for heads in held}) == 1


@pytest.mark.parametrize("total", [1, 2, 8])
@pytest.mark.parametrize("prefill", SIZES)
@pytest.mark.parametrize("decode", SIZES)
def test_each_head_comes_once(prefill: int, decode: int, total: int) -> None:
    for rank in range(decode):
        wanted = head_range(rank, decode, total)
        taken = [h for peer in sources(rank, decode, prefill, total) for h in head_range(peer, prefill, total)]
        assert sorted(head for head in taken if head in wanted) == list(wanted)


@pytest.mark.parametrize("total", [1, 2, 8])
@pytest.mark.parametrize("prefill", SIZES)
@pytest.mark.parametrize("decode", SIZES)
def test_readers_are_those_whose_source_we_are(prefill: int, decode: int, total: int) -> None:
    for rank in range(prefill):
        mine = [d for d in range(decode) if rank in sources(d, decode, prefill, total)]
        assert readers(rank, prefill, decode, total) == mine


def test_equal_sizes_pair_by_rank() -> None:
    assert [sources(rank, 4, 4, 8) for rank in range(4)] == [[0], [1], [2], [3]]


def test_two_to_four_and_back() -> None:
    assert [sources(rank, 4, 2, 8) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [sources(rank, 2, 4, 8) for rank in range(2)] == [[0, 1], [2, 3]]
