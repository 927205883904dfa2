"""Block arithmetic and coalescing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.memory.blocks import blocks_for, runs, writable_blocks

sizes = st.integers(1, 256)


@given(st.integers(0, 100_000), sizes)
def test_blocks_hold_the_tokens_and_no_block_is_spare(tokens: int, size: int) -> None:
    blocks = blocks_for(tokens, size)
    assert blocks * size >= tokens
    assert (blocks - 1) * size < tokens or not blocks


@given(st.integers(0, 10_000), st.integers(1, 10_000), sizes)
def test_only_final_blocks_are_writable(computed: int, prompt: int, size: int) -> None:
    computed = min(computed, prompt)
    blocks = writable_blocks(computed, prompt, size)
    if computed == prompt:
        assert blocks == blocks_for(prompt, size)
    else:
        assert blocks * size <= computed < (blocks + 1) * size


@given(st.integers(1, 10_000), sizes, st.data())
def test_writable_blocks_never_shrink_while_a_prompt_is_computed(prompt: int, size: int, data: st.DataObject) -> None:
    steps = [*sorted(data.draw(st.lists(st.integers(0, prompt), max_size=8))), prompt]
    written = [writable_blocks(computed, prompt, size) for computed in steps]
    assert written == sorted(written)
    assert written[-1] == blocks_for(prompt, size)


ids = st.lists(st.integers(0, 60), unique=True, max_size=40)


@given(ids, ids)
def test_runs_copy_exactly_the_pairs(local: list[int], remote: list[int]) -> None:
    count = min(len(local), len(remote))
    local, remote = local[:count], remote[:count]
    copied = [(a + i, b + i) for a, b, n in runs(local, remote) for i in range(n)]
    assert sorted(copied) == sorted(zip(local, remote, strict=True))


@given(ids, ids)
def test_runs_are_as_long_as_can_be(local: list[int], remote: list[int]) -> None:
    count = min(len(local), len(remote))
    found = runs(local[:count], remote[:count])
    for (here, there, n), (next_here, next_there, _) in itertools.pairwise(found):
        assert (here + n, there + n) != (next_here, next_there)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50), st.randoms(use_true_random=False))
def test_one_run_in_any_order_is_one_run(here: int, there: int, count: int, random: object) -> None:
    pairs = [(here + i, there + i) for i in range(count)]
    random.shuffle(pairs)  # type: ignore[attr-defined]
    assert runs([a for a, _ in pairs], [b for _, b in pairs]) == [(here, there, count)]


def test_descending_ids_on_both_sides_coalesce() -> None:
    assert runs([7, 6, 5], [3, 2, 1]) == [(5, 1, 3)]


def test_opposite_directions_do_not_coalesce() -> None:
    assert runs([5, 6, 7], [3, 2, 1]) == [(7, 1, 1), (6, 2, 1), (5, 3, 1)]


def test_unequal_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="2 local blocks for 1 remote"):
        runs([1, 2], [1])
