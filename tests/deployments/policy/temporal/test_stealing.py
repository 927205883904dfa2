"""Batches of a pipeline even out, and no request is withheld for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.policy.temporal.stealing import Evening

Size = Callable[[int, int], int]


class Pipeline:
    """Batches under way, the oldest first, and what is withheld. `size`: decides, from what is ready and live."""

    def __init__(self, batches: Sequence[int], size: Size) -> None:
        self._under_way, self._size = deque(batches), size
        self.withheld = 0

    @property
    def live(self) -> int:
        return sum(self._under_way) + self.withheld

    @property
    def sizes(self) -> list[int]:
        return list(self._under_way)

    def turn(self, finish: int) -> int:
        """The oldest batch returns without those that `finish`, and the next one is submitted: its size."""
        self.withheld += self._under_way.popleft() - finish
        live, ready = self.live, self.withheld
        submitted = self._size(ready, live)
        self.withheld -= submitted
        self._under_way.append(submitted)
        return submitted


def test_the_vector_of_four_batches() -> None:
    """48 of the first batch finish, and 8 of the second."""
    pipeline, means, submitted, withheld = Pipeline([128] * 4, Evening(4).size), [], [], []
    for finish in (48, 8, 0, 0):
        submitted.append(pipeline.turn(finish))
        means.append(pipeline.live / 4)
        withheld.append(pipeline.withheld)
    assert means == [116, 114, 114, 114]
    assert submitted == [80, 114, 114, 114]
    assert withheld == [0, 6, 20, 34]
    assert pipeline.turn(0) == 114, "the first gets 34"
    assert (pipeline.withheld, pipeline.sizes) == (0, [114, 114, 114, 114])


def forgetful(stages: int) -> Size:
    """Evens to the mean of the last batches as they were submitted, rounded up, without what is withheld."""
    window, withheld = deque([128] * stages, maxlen=stages), 0

    def size(ready: int, _: int) -> int:
        nonlocal withheld
        window.append(ready - withheld)
        submitted = window[-1] = min(ready, -(-sum(window) // stages))
        withheld = ready - submitted
        return submitted

    return size


def after(rounds: int, size: Size) -> int:
    """What is withheld of the vector's requests after many rounds in which none finishes."""
    pipeline = Pipeline([128] * 4, size)
    for finish in (48, 8, *[0] * (4 * rounds)):
        pipeline.turn(finish)
    return pipeline.withheld


def test_a_window_that_forgets_what_is_withheld_strands_requests() -> None:
    """Why live requests are counted, and not what was submitted."""
    assert after(10, forgetful(4)) == after(1000, forgetful(4)) == 20
    assert after(10, Evening(4).size) == 0


@given(st.integers(1, 8), st.lists(st.integers(0, 300), min_size=8, max_size=8), st.data())
def test_batches_of_any_size_are_even_after_a_few_rounds(stages: int, batches: list[int], data: st.DataObject) -> None:
    pipeline = Pipeline(batches[:stages], Evening(stages).size)
    for _ in range(data.draw(st.integers(0, 20))):
        pipeline.turn(data.draw(st.integers(0, pipeline.sizes[0])))
    for _ in range(3 * stages):
        pipeline.turn(0)
    assert pipeline.withheld <= max(0, stages - 1), "what rounding leaves goes with the next batches"
    sizes = pipeline.sizes
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("live", range(9))
def test_fewer_requests_than_stages_go_one_by_one(live: int) -> None:
    pipeline = Pipeline([live, 0, 0, 0], Evening(4).size)
    for _ in range(4):
        pipeline.turn(0)
    assert max(pipeline.sizes) - min(pipeline.sizes) <= 1
    assert pipeline.withheld == 0


@given(st.integers(1, 8), st.lists(st.integers(0, 400), min_size=1, max_size=60))
def test_no_request_is_lost_or_made(stages: int, counts: list[int]) -> None:
    evening = Evening(stages)
    for ready in counts:
        size = evening.size(ready, ready + 7)
        assert 0 <= size <= ready
        assert size > 0 or ready == 0, "an engine with something ready does not stand still"
