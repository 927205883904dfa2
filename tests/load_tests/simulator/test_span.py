"""Many decode steps in closed form are what they are one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.simulator.decoding import DecodeBatch
from load_tests.simulator.span import Span
from load_tests.simulator.work import Work

spans = st.builds(
    Span,
    base_s=st.floats(1e-4, 0.1),
    context_s=st.one_of(st.just(0.0), st.floats(1e-9, 1e-4)),
    sequences=st.integers(1, 300),
    context=st.integers(0, 10**6),
)


@given(spans, st.integers(1, 200))
def test_seconds_are_the_sum_of_the_steps(span: Span, steps: int) -> None:
    assert span.seconds(steps) == pytest.approx(sum(span.step_s(step) for step in range(steps)))


@given(spans, st.integers(0, 500), st.floats(0.01, 0.99))
def test_steps_ended_is_the_inverse_of_seconds(span: Span, steps: int, part: float) -> None:
    assert span.steps_ended(span.seconds(steps)) == steps
    assert span.steps_ended(span.seconds(steps) + part * span.step_s(steps)) == steps


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 30)), min_size=1, max_size=6),
    st.integers(1, 7),
    st.integers(0, 40),
)
def test_growth_counts_the_blocks_that_sequences_begin(lengths: list[tuple[int, int]], block: int, steps: int) -> None:
    batch = DecodeBatch(block)
    works = [Work(str(i), 1, prompt, outputs, generated=1) for i, (prompt, outputs) in enumerate(lengths)]
    for one in works:
        batch.join(one)
    steps = min(steps, batch.steps_left())

    def blocks(extra: int) -> int:
        return sum(-(-(one.context + extra) // block) for one in works)

    assert batch.growth(steps) == blocks(steps) - blocks(0)
    for free in (0, 1, 5):
        within = batch.steps_within(free, steps)
        assert blocks(within) - blocks(0) <= free
        assert within == steps or blocks(within + 1) - blocks(0) > free


def test_a_sequence_that_was_dropped_ends_when_it_has_all_its_tokens() -> None:
    batch = DecodeBatch(4)
    first, second = Work("a", 1, 4, 6, generated=1), Work("b", 1, 4, 4, generated=1)
    batch.join(first)
    batch.join(second)
    assert not batch.advance(1)
    assert batch.drop_newest() is second
    assert (second.generated, batch.context) == (2, 5)
    batch.join(second)
    assert batch.steps_left() == 2
    assert batch.advance(2) == [second]
    assert batch.advance(2) == [first]
    assert (first.generated, second.generated, batch.context, len(batch)) == (6, 4, 0, 0)
