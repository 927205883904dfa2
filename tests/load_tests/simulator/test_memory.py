"""Paged memory with a prefix cache: blocks are shared, evicted oldest first, and never lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from load_tests.simulator.memory import BlockMemory
from load_tests.simulator.work import Work

BLOCK = 4


def work(name: str, hashes: tuple[int, ...], extra: int = 1) -> Work:
    return Work(name, 1, len(hashes) * BLOCK + extra, 8, hashes)


def computed(memory: BlockMemory, one: Work) -> bool:
    if not memory.allocate(one, one.target):
        return False
    memory.commit(one, one.target)
    return True


def freed(memory: BlockMemory, one: Work) -> None:
    memory.release(one, memory.blocks_for(one.target))


def test_what_is_evicted_is_kept_in_the_tier_until_that_is_full() -> None:
    memory = BlockMemory(4, BLOCK, tier_blocks=4)
    for number in range(3):  # three blocks and one more each
        one = work(str(number), tuple(range(10 * number, 10 * number + 3)))
        assert computed(memory, one)
        freed(memory, one)
    assert memory.hits((20, 21, 22), 3) == 3
    assert (memory.hits((10, 11, 12), 3), memory.kept((10, 11, 12), 3)) == (0, 3)
    assert memory.kept((0, 1, 2), 3) < 3, "the oldest went for good"
    stored, removed, left, _ = memory.changes()
    assert set(stored) >= {10, 11, 12, 20, 21, 22}
    assert not {10, 11, 12, 20, 21, 22} & set(removed)
    assert {10, 11, 12} <= set(left)
    assert not {20, 21, 22} & set(left)
    again = work("again", (10, 11, 12))
    assert computed(memory, again)
    assert again.cached_tokens == 0
    assert memory.hits((10, 11, 12), 3) == 3
    assert set(memory.changes()[3]) >= {10, 11, 12}


def test_what_one_computed_another_finds() -> None:
    memory = BlockMemory(10, BLOCK)
    first, second = work("a", (1, 2, 3)), work("b", (1, 2, 4))
    assert computed(memory, first)
    assert computed(memory, second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 2 * BLOCK)
    assert memory.used == 4 + 2
    freed(memory, first)
    assert (memory.used, memory.idle) == (4, 1)
    freed(memory, second)
    assert (memory.used, memory.idle) == (0, 4)


def test_at_least_one_token_is_left_to_compute() -> None:
    memory = BlockMemory(10, BLOCK)
    assert computed(memory, work("a", (1, 2), extra=0))
    again = work("b", (1, 2), extra=0)
    assert computed(memory, again)
    assert again.cached_tokens == BLOCK


def test_the_oldest_and_of_a_prompt_the_end_is_evicted_first() -> None:
    memory = BlockMemory(5, BLOCK)
    old, new = work("a", (1, 2), extra=0), work("b", (7, 8), extra=0)
    for one in (old, new):
        assert computed(memory, one)
        freed(memory, one)
    assert memory.allocate(work("c", ()), 2 * BLOCK)
    assert memory.hits((1, 2), 2) == 1
    assert memory.hits((7, 8), 2) == 2


def test_what_does_not_fit_changes_nothing() -> None:
    memory = BlockMemory(3, BLOCK)
    assert computed(memory, work("a", (1,)))
    assert not memory.allocate(work("b", (5, 6)), 2 * BLOCK)
    assert not memory.allocate(work("c", (5,)), BLOCK, reserve=1)
    assert (memory.used, memory.idle) == (2, 0)


def test_changes_add_up_to_what_is_cached_and_each_is_told_once() -> None:
    memory = BlockMemory(3, BLOCK)
    for name, hashes in (("a", (1, 2)), ("b", (3, 4)), ("c", (5, 6))):
        one = work(name, hashes, extra=0)
        assert computed(memory, one)
        freed(memory, one)
    stored, removed, *_ = memory.changes()
    assert set(stored) == {3, 5, 6}  # 1, 2 and 4 came and went untold
    assert not removed
    assert memory.changes() == ((), (), (), ())


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 6), unique=True, max_size=4), st.integers(1, 5), st.booleans()), max_size=40
    )
)
def test_blocks_are_conserved_and_reports_match_the_cache(steps: list[tuple[list[int], int, bool]]) -> None:
    memory, live, told = BlockMemory(12, BLOCK), [], set[int]()
    for index, (hashes, extra, frees) in enumerate(steps):
        chain = tuple(sum(h * 10**i for i, h in enumerate(hashes[:end])) for end in range(1, len(hashes) + 1))
        one = work(str(index), chain, extra)
        if computed(memory, one):
            live.append(one)
        if frees and live:
            freed(memory, live.pop(0))
        stored, removed, *_ = memory.changes()
        assert not set(stored) & told
        assert set(removed) <= told
        told = (told | set(stored)) - set(removed)
        assert memory.used >= 0
        assert memory.used + memory.idle <= memory.total
        assert sum(memory.hits((block,), 1) for block in told) == len(told)
    for one in live:
        freed(memory, one)
    assert memory.used == 0


def test_a_copy_takes_the_place_of_what_is_oldest_and_is_reported() -> None:
    memory = BlockMemory(4, 16)
    memory.copy((1, 2))
    memory.changes()
    memory.copy((1, 2, 3, 4, 5))
    assert (memory.hits((1, 2, 3, 4, 5), 5), memory.idle, memory.used) == (4, 4, 0)
    stored, removed, *_ = memory.changes()
    assert (set(stored), set(removed)) == ({3, 4}, set())


def test_a_copy_takes_no_block_that_is_in_use() -> None:
    memory = BlockMemory(3, 16)
    memory.grow(2)
    memory.copy((1, 2))
    assert (memory.hits((1, 2), 2), memory.used) == (1, 2)
