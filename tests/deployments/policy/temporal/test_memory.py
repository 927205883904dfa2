"""Memory at future points: incremental as if counted anew, and no request weighs nothing."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.temporal.memory import POINT_STEPS, POINTS, FutureMemory, Outlook, until

BLOCK = 16
lengths = st.tuples(st.integers(1, 5000), st.integers(1, 3000))


def by_hand(requests: list[tuple[int, int]]) -> list[int]:
    """The same, point by point and request by request."""
    usage = []
    for point in range(POINT_STEPS, POINT_STEPS * POINTS + 1, POINT_STEPS):
        blocks = 0
        for held, left in requests:
            if point <= math.ceil(left / POINT_STEPS) * POINT_STEPS:
                blocks += math.ceil((held + min(point, left)) / BLOCK)
        usage.append(blocks)
    return usage


def filled(requests: list[tuple[int, int]]) -> FutureMemory:
    memory = FutureMemory(BLOCK)
    for key, (held, left) in enumerate(requests):
        memory.put(key, held, until(left))
    return memory


def test_the_points_are_every_32_steps_to_1024() -> None:
    assert (POINT_STEPS, POINTS * POINT_STEPS) == (32, 1024)


def test_a_request_is_counted_until_the_point_after_its_end() -> None:
    usage = filled([(160, 40)]).usage
    assert usage[:3] == (12, 13, 0), "32 and then all 40 tokens, in blocks of 16; at 96 it is over"


def test_a_request_that_ends_before_the_first_point_holds_its_prompt_until_there() -> None:
    assert filled([(1600, 1)]).usage[:2] == (101, 0)


def test_a_request_that_ends_at_a_point_is_over_behind_it() -> None:
    assert filled([(16, 32)]).usage[:2] == (3, 0)


def test_a_longer_request_is_counted_at_every_point() -> None:
    usage = filled([(16, 5000)]).usage
    assert usage[-1] == 65
    assert filled([(16, 5000)]).peak == 65


def test_a_request_counts_with_its_chance_to_be_there() -> None:
    memory = FutureMemory(BLOCK)
    memory.put("a", 160, Outlook(np.array([1.0, 0.5] + [0.25] * (POINTS - 2)), 96))
    assert memory.usage[:4] == (12, 7, 4, 4), "12, 14 and 16 blocks; it may write 96 tokens at the most"


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), max_size=60))
def test_nothing_is_left_of_requests_that_are_over(chances: list[tuple[int, float]]) -> None:
    memory = FutureMemory(BLOCK)
    for key, (held, chance) in enumerate(chances):
        memory.put(key, held, Outlook(np.linspace(1.0, chance, POINTS), 2000))
    for key in range(len(chances)):
        memory.drop(key)
    assert memory.usage == (0.0,) * POINTS


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), lengths)),
        max_size=40,
    )
)
def test_changes_one_by_one_are_as_counting_anew(changes: list[tuple[str, tuple[int, int] | None]]) -> None:
    memory, now = FutureMemory(BLOCK), dict[str, tuple[int, int]]()
    for key, change in changes:
        if change is None:
            memory.drop(key)
            now.pop(key, None)
        else:
            held, left = change
            memory.put(key, held, until(left))
            now[key] = change
        assert list(memory.usage) == by_hand(list(now.values()))
        assert (key in memory) == (key in now)
    assert len(memory) == len(now)


@given(st.lists(lengths, max_size=8), st.lists(lengths, max_size=12), st.integers(0, 2000))
def test_as_many_fit_as_keep_every_point_under_what_there_is(
    running: list[tuple[int, int]], waiting: list[tuple[int, int]], blocks: int
) -> None:
    memory = filled(running)
    before = memory.usage
    count = memory.fitting([(held, until(left)) for held, left in waiting], blocks)
    assert memory.usage == before, "a look changes nothing"
    if count:
        assert max(by_hand(running + waiting[:count])) <= blocks
    if count < len(waiting):
        assert max(by_hand(running + waiting[: count + 1])) > blocks
