"""What a replica lets go for one more session: enough, nothing that is not needed, and the least held first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.fleet.columns import ReplicaView
from deployments.messages import ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.letting_go import (
    MOST_TIMES,
    Answer,
    Shortage,
    let_go,
    may_be_let_go,
    shortage,
)
from deployments.step_cost import Coefficients

STEP = Coefficients(0.010, 1e-4, 0.0, 0.002, 1e-6)
INFO = ReplicaInfo("d0", "decode", Role.DECODE, "node", "engine", 16, 100, 8, 2048)


def lacking(blocks: float = 0, places: int = 0, step_s: float = -1.0) -> Shortage:
    return Shortage(blocks, places, step_s, STEP)


def names(answers: Sequence[Answer]) -> list[str]:
    return [each.session_id for each in answers]


ANSWERS = [Answer("long", 20, 300.0), Answer("short", 5, 30.0), Answer("middle", 10, 90.0)]


@pytest.mark.parametrize(
    ("lacks", "expected"),
    [
        (lacking(), []),
        (lacking(blocks=5), ["short"]),
        (lacking(blocks=6), ["middle"]),
        (lacking(blocks=16), ["long"]),
        (lacking(blocks=21), ["short", "long"]),
        (lacking(blocks=26), ["middle", "long"]),
        (lacking(blocks=99), ["short", "middle", "long"]),
        (lacking(places=1), ["short"]),
        (lacking(places=2), ["short", "middle"]),
        (lacking(step_s=0.00205), ["middle"]),
        (lacking(step_s=0.0041), ["short", "middle"]),
        (lacking(blocks=3, places=2), ["short", "middle"]),
    ],
)
def test_the_least_held_go_first_and_what_is_not_needed_stays(lacks: Shortage, expected: list[str]) -> None:
    assert names(let_go(ANSWERS, lacks)) == expected


_ANSWERS = st.lists(st.tuples(st.integers(1, 50), st.floats(1.0, 1000.0)), max_size=8).map(
    lambda each: [Answer(str(number), *what) for number, what in enumerate(each)]
)


@given(_ANSWERS, st.integers(-5, 120), st.integers(-3, 9))
def test_what_goes_is_enough_and_none_of_it_could_stay(answers: list[Answer], blocks: int, places: int) -> None:
    lacks = lacking(blocks, places)
    gone = let_go(answers, lacks)
    left = lacks
    for each in gone:
        left = left.without(each)
    assert left.is_over or len(gone) == len(answers), "all go where even that is not enough"
    if left.is_over:
        assert not any(left.without(each, -1).is_over for each in gone)
    assert let_go(list(reversed(answers)), lacks) == gone, "their order says nothing"


@pytest.mark.parametrize(
    ("view", "objective_s", "expected"),
    [
        ({}, 0.0, (-40, -5, False)),
        ({"free_blocks": 8}, 0.0, (2, -5, False)),
        ({"sessions": 8}, 0.0, (-40, 1, False)),
        ({}, 0.020, (-40, -5, False)),
        ({}, 0.015, (-40, -5, True)),
        ({"tpot_s": 0.015}, 0.0, (-40, -5, True)),
        ({"tpot_s": 0.015}, 0.020, (-40, -5, True)),
    ],
)
def test_what_a_replica_lacks(view: dict[str, Any], objective_s: float, expected: tuple[int, int, bool]) -> None:
    """Two answers that hold 100 tokens; a step takes 16.2 ms with one more that holds 100."""
    owner = ReplicaView(INFO, 50, 2, 0, held_tokens=100.0)._replace(**view)
    found = shortage(owner, 10, 100.0, objective_s, STEP, 1.0)
    assert (found.blocks, found.places, found.step_s > 0) == expected
    assert shortage(owner, 10, 100.0, objective_s, STEP, 2.0).step_s <= 0, "with slack"


def test_where_steps_are_not_known_none_is_let_go_for_its_pace() -> None:
    owner = ReplicaView(INFO, 50, 2, 0, held_tokens=100.0)
    assert shortage(owner, 10, 100.0, 1e-9, Coefficients(0.0, 0.0, 0.0, 0.0, 0.0), 1.0).is_over


def test_a_session_is_let_go_so_often_and_then_ends() -> None:
    request = SessionRequest("a", 10, 10)
    assert [may_be_let_go(replace(request, attempt=1 + each)) for each in range(MOST_TIMES + 1)] == [
        *[True] * MOST_TIMES,
        False,
    ]
