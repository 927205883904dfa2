"""What a leaving replica hands on: the hottest beginnings first, where they fit, in the time that is left."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from deployments.policy.handing_on import DISPLACED_SHARE, MOST_TARGETS, Handed, Target, hand_on
from deployments.policy.placement.fetch import FETCH_S

LONG_S = 1000.0
A, B = Target("a", 100, 100, 0.01), Target("b", 50, 50, 0.01)


def nowhere(prompt: Sequence[int]) -> Mapping[str, int]:
    del prompt
    return {}


def test_a_prompt_goes_to_the_replica_with_most_room() -> None:
    assert hand_on([[1, 2, 3]], nowhere, [B, A], LONG_S) == [Handed("a", 0, 3, 3)]


def test_what_several_prompts_share_goes_first_and_once() -> None:
    prompts = [[1, 2, 3, 4], [7, 8], [1, 2, 5]]
    plan = hand_on(prompts, nowhere, [A], LONG_S)
    assert plan == [Handed("a", 0, 2, 2), Handed("a", 0, 4, 2), Handed("a", 1, 2, 2), Handed("a", 2, 3, 1)]


def test_a_prompt_goes_to_where_its_beginning_is() -> None:
    plan = hand_on([[1, 2, 3]], lambda prompt: {"b": min(2, len(prompt))}, [A, B], LONG_S)
    assert plan == [Handed("b", 0, 3, 1)]


def test_what_another_replica_has_stays_there() -> None:
    assert not hand_on([[1, 2, 3]], lambda prompt: {"b": len(prompt)}, [A, B], LONG_S)
    assert not hand_on([[1, 2, 3]], lambda prompt: {"b": len(prompt), "a": 1}, [A, B], LONG_S)


def test_what_the_leaving_replica_alone_has_is_no_copy() -> None:
    assert hand_on([[1, 2]], lambda prompt: {"leaving": len(prompt)}, [A], LONG_S) == [Handed("a", 0, 2, 2)]


def test_of_a_large_fleet_those_with_most_room_get_something_and_what_any_of_it_has_stays() -> None:
    fleet = [Target(f"r{number}", number, number, 0.01) for number in range(MOST_TARGETS + 20)]
    prompts = [[number] for number in range(100)]
    plan = hand_on(prompts, nowhere, fleet, LONG_S)
    assert len(plan) == len(prompts)
    assert {each.replica_id for each in plan} <= {each.replica_id for each in fleet[-MOST_TARGETS:]}
    assert not hand_on(prompts, lambda prompt: {"r0": len(prompt)}, fleet, LONG_S)


def test_without_others_or_prompts_nothing_goes() -> None:
    assert not hand_on([[1]], nowhere, [], LONG_S)
    assert not hand_on([], nowhere, [A], LONG_S)
    assert not hand_on([[]], nowhere, [A], LONG_S)


def test_what_does_not_come_in_time_is_left_out_and_something_shorter_goes() -> None:
    left_s = FETCH_S + 2 * A.block_s + 0.001
    assert hand_on([[1, 2, 3], [4, 5]], nowhere, [A], left_s) == [Handed("a", 1, 2, 2)]
    assert not hand_on([[1]], nowhere, [A], FETCH_S)


def test_cached_kv_makes_room_for_what_is_shared_alone() -> None:
    full = Target("a", 10, 0, 0.01)
    assert not hand_on([[1, 2]], nowhere, [full], LONG_S)
    shared = [[1, 2, 3], [1, 2, 4]]
    assert hand_on(shared, nowhere, [full], LONG_S) == [Handed("a", 0, 2, 2)]
    most = int(10 * DISPLACED_SHARE)
    long = list(range(most + 1))
    assert not hand_on([[*long, 100], [*long, 101]], nowhere, [full], LONG_S)


def chained(tokens: Sequence[int]) -> list[int]:
    """A block's hash has the blocks before it in it."""
    return [hash(tuple(tokens[: place + 1])) for place in range(len(tokens))]


@pytest.mark.parametrize("seed", range(20))
def test_no_replica_gets_more_than_it_has_room_for(seed: int) -> None:
    draw = random.Random(seed)
    prompts = [chained([draw.randrange(2) for _ in range(draw.randint(0, 12))]) for _ in range(20)]
    targets = [Target(name, free := draw.randint(0, 60), draw.randint(0, free), 0.01) for name in "abc"]
    left_s = draw.random() * 5
    plan = hand_on(prompts, nowhere, targets, left_s)
    for target in targets:
        mine = [each for each in plan if each.replica_id == target.replica_id]
        came = {block for each in mine for block in prompts[each.prompt][: each.blocks]}
        assert len(came) == sum(each.new for each in mine) <= target.free_blocks
    assert sum(FETCH_S + each.new * 0.01 for each in plan) <= left_s + 1e-9
