"""The code of each decision: what it says, that each pool has one, and that the guide explains them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.policy.scaling.inputs import Waiting
from deployments.policy.scaling.reasons import Reason
from tests.deployments.policy.scaling.world import World, asked, config

SOME, MANY = {"chat": asked(20.0)}, {"chat": asked(80.0)}
ROOT = Path(__file__).parents[4]


def decided(world: World, direction: int | None = None) -> dict[str, set[Reason]]:
    """The codes by pool: all, or those of the plans in which its target went up (1), down (-1) or stayed (0)."""
    found: dict[str, set[Reason]] = {name: set() for name in world.target}
    for before, plan in zip(world.plans, world.plans[1:], strict=False):
        assert plan.codes.keys() == plan.targets.keys()
        for name, size in plan.targets.items():
            change = (size > before.targets[name]) - (size < before.targets[name])
            if direction in (None, change):
                found[name].add(plan.codes[name])
    return found


def test_growing_shrinking_and_staying_have_their_own_codes() -> None:
    world = World(config())
    world.run(300, SOME)
    world.run(300, MANY)
    world.run(1200, SOME)
    up, down, stay = (decided(world, direction) for direction in (1, -1, 0))
    assert up["prefill"] <= {Reason.PREFILL_TTFT, Reason.PREFILL_BUSY, Reason.FORECAST_FLOOR}
    assert up["prefill"] & {Reason.PREFILL_TTFT, Reason.PREFILL_BUSY}
    assert up["decode-main"] & {Reason.DECODE_PLACES, Reason.DECODE_MEMORY, Reason.DECODE_TPOT}
    assert down == {"prefill": {Reason.SPARE}, "decode-main": {Reason.SPARE}}
    for name in world.target:
        assert {Reason.NEEDED, Reason.NEEDED_LATELY, Reason.HOLD} <= stay[name]


def test_growth_for_the_load_to_come_is_the_forecasts() -> None:
    """The load of now needs no more; a ramp that is seen needs more when a start is over."""
    world = World(config(), start_s=120.0)
    for number in range(60):
        world.step({"chat": asked(10.0 + number)})
    assert Reason.FORECAST_FLOOR in decided(world, 1)["prefill"]
    (first, *_) = (plan for plan in world.plans if plan.codes["prefill"] is Reason.FORECAST_FLOOR)
    assert first.growth > 1.0
    assert "the load is expected to grow" in first.reasons["prefill"]


def test_zero_and_back() -> None:
    free = {"autoscaling": {"min_replicas": 0, "max_replicas": 4}, "engine": {"kind": "mock"}}
    world = World(config({"prefill": free, "decode": {"main": free}}, idle_s=60.0))
    world.waiting = Waiting(prefill=1, prefill_tokens=1000)
    assert set(world.run(5).codes.values()) == {Reason.WAKE}
    world.waiting = Waiting()
    world.run(400)
    assert set(decided(world, -1)["prefill"]) == {Reason.IDLE_ZERO}
    assert set(world.plans[-1].codes.values()) == {Reason.IDLE_ZERO}


@pytest.mark.parametrize(
    ("scaling", "room", "code"),
    [({"max_cost_per_hour": 4.0}, {}, Reason.BUDGET), ({"start_timeout_s": 60.0}, {"prefill": 2}, Reason.CANNOT_PLACE)],
)
def test_what_keeps_a_pool_too_small(scaling: dict[str, Any], room: dict[str, int], code: Reason) -> None:
    world = World(config(**scaling), room=room)
    world.run(150, MANY)
    assert code in decided(world)["prefill"]
    assert world.plans[-1].codes["prefill"] is code


def test_a_pool_at_its_most_says_so() -> None:
    few = {"autoscaling": {"min_replicas": 1, "max_replicas": 2}, "engine": {"kind": "mock"}}
    plan = World(config({"mixed": {"all": few}})).run(100, MANY)
    assert (plan.targets, plan.codes) == ({"mixed-all": 2}, {"mixed-all": Reason.MOST})


def test_the_guide_explains_every_code() -> None:
    guide = (ROOT / "docs/guides/scaling.md").read_text()
    assert [code for code in Reason if f"| `{code}` |" not in guide] == []
