"""The messages between the connector's two sides."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from transfer.channel.layers import Chunk
from transfer.vllm.step_messages import Offering, StepMetadata, WorkerMetadata

KEY = ("session", 1)


@pytest.mark.parametrize(
    "field",
    [
        {"chunks": [Chunk(KEY, "p", 4, 8, (1,))]},
        {"ended": [(KEY, "p", True, 1)]},
        {"offers": [Offering(KEY, "d", ["peer"], 0, [1])]},
        {"cancels": [(KEY, "aborted")]},
        {"unoffered": [(KEY, ["peer"])]},
        {"preempted": [KEY]},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_step_with_anything_to_tell_is_true(field: dict[str, Any]) -> None:
    assert StepMetadata(**field)
    assert not StepMetadata()


def test_workers_tokens_add_up_and_the_news_of_decodes_is_kept() -> None:
    first, second = WorkerMetadata({"a": 1}, ("one",)), WorkerMetadata({"b": 2})
    both = {"a": 1, "b": 2}
    assert first.aggregate(second) == WorkerMetadata(both, ("one",))
    assert second.aggregate(first) == WorkerMetadata(both, ("one",))
    assert second.aggregate(WorkerMetadata({}, ())).decodes == (), "no decode replica is news, too"


def test_workers_that_wait_no_longer_are_counted() -> None:
    one, two = WorkerMetadata({}, late=Counter("r")), WorkerMetadata({}, late=Counter("rs"), stopped=Counter("q"))
    both = one.aggregate(two)
    assert (both.late, both.stopped) == ({"r": 2, "s": 1}, {"q": 1})
    assert one
    assert not WorkerMetadata({})
