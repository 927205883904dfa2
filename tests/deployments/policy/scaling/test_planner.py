"""The planner on a fleet that follows it: what grows, what shrinks, and each way in which other planners fail."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from deployments.messages import Role, StepSample
from deployments.policy.prediction.step_time import StepModel
from deployments.policy.scaling.inputs import Now, PoolNow, Waiting
from deployments.policy.scaling.planner import Planner
from deployments.policy.scaling.predict import Load, predict
from tests.deployments.policy.scaling.world import BLOCK, BLOCKS, DECODE, PLACES, PREFILL, World, asked, config

SOME = {"chat": asked(20.0)}
MANY = {"chat": asked(80.0)}
POOLS = ("prefill", "decode-main")


def test_pools_follow_four_times_the_load_and_back() -> None:
    world = World(config())
    small = world.run(300, SOME).targets
    large = world.run(300, MANY).targets
    again = world.run(1200, SOME).targets
    assert all(large[name] >= 2 * small[name] for name in POOLS)
    assert all(again[name] <= small[name] + 1 for name in POOLS)
    assert all(plan.reasons[name].startswith(f"{plan.targets[name]}:") for plan in world.plans[-1:] for name in POOLS)


def test_a_plan_is_json_and_says_why() -> None:
    world = World(config())
    world.run(60, SOME)
    plan = world.run(30, MANY)
    told = json.loads(json.dumps(dataclasses.asdict(plan)))
    assert told["targets"] == plan.targets
    grown = [each.reasons["prefill"] for each in world.plans if "->" in each.reasons["prefill"]]
    assert any("first tokens of class chat" in why or "of its time" in why for why in grown)


def test_the_wait_in_the_queue_is_part_of_the_predicted_first_token() -> None:
    """A prompt takes 0.11 s of 1 s: a predictor without the queue sees no reason to grow at 97% of one replica."""
    world = World(config())
    plan = world.run(120, {"chat": asked(0.97 / 0.11)})
    assert plan.targets["prefill"] > 1
    first = next(each for each in world.plans if each.targets["prefill"] > 1)
    assert "first tokens" in first.reasons["prefill"] or "of its time" in first.reasons["prefill"]


def test_slow_first_steps_of_cold_replicas_change_nothing() -> None:
    model = StepModel(DECODE)
    warm = [StepSample(DECODE.step_s(0, 0, n, n * 1000), 0, 0, n, n * 1000) for n in range(1, 65)] * 4
    for sample in warm:
        model.observe(sample)
    for number in range(8):
        model.observe(StepSample(20 * DECODE.step_s(0, 0, 8, 8000), 0, 0, 8, 8000))
        for sample in warm[number * 4 : number * 4 + 4]:
            model.observe(sample)
    cold, before = World(config()), World(config())
    cold.speeds["decode-main"] = model.coefficients
    assert cold.run(300, MANY).targets == before.run(300, MANY).targets


@pytest.mark.parametrize("per_s", [6.0, 7.0, 8.0, 9.0, 16.0, 40.0])
def test_steady_load_does_not_flap(per_s: float) -> None:
    """Also where the load is at the edge between two sizes, and arrivals are by chance."""
    world = World(config())
    world.run(600, {"chat": asked(per_s)}, noise=True)
    world.plans.clear()
    world.run(3600, {"chat": asked(per_s)}, noise=True)
    assert world.reversals() < 2


def test_a_replica_that_cannot_be_placed_is_given_up_and_blocks_nothing() -> None:
    world = World(config(start_timeout_s=120.0), room={"decode-main": 2})
    world.run(60, SOME)
    world.run(60, MANY)
    assert world.target["decode-main"] > 2
    assert world.target["prefill"] > 3, "the other pool grows meanwhile"
    plan = world.run(120, MANY)
    assert plan.targets["decode-main"] == 2
    assert "given up" in plan.reasons["decode-main"]
    assert world.run(900, {"chat": asked(2.0)}).targets == {"prefill": 1, "decode-main": 1}, "and it shrinks"


def test_another_pool_takes_the_place_of_one_that_cannot_grow() -> None:
    free = {"autoscaling": {"min_replicas": 1, "max_replicas": 20}, "engine": {"kind": "mock"}}
    pools = {"prefill": free, "decode": {"dear": {**free, "cost": 2.0}, "cheap": free}}
    world = World(config(pools, start_timeout_s=60.0), room={"decode-cheap": 1})
    grown = world.run(60, MANY).targets
    assert grown["decode-cheap"] > grown["decode-dear"], "the same speed for half the cost"
    later = world.run(180, MANY).targets
    assert later["decode-cheap"] == 1
    assert later["decode-dear"] > 2


def test_starts_in_flight_are_part_of_the_plan() -> None:
    """While they take ten minutes, no more are asked for."""
    world = World(config(), start_s=500.0)
    world.run(60, SOME)
    world.run(60, MANY)
    wanted = dict(world.target)
    world.run(300, MANY)
    assert all(world.target[name] <= wanted[name] + 1 for name in POOLS)
    assert sum(map(len, world.starts.values())) > 0


def test_one_very_long_prompt_keeps_no_floor() -> None:
    world = World(config())
    world.run(300, {"chat": asked(2.0)})
    world.backlog_s = 40.0
    world.step({"chat": asked(0.2, prompt=400_000.0, held=401_000.0)})
    world.backlog_s = 0.0
    plan = world.run(600, {"chat": asked(2.0)})
    assert plan.targets["prefill"] == 1


def test_prefill_does_not_grow_while_decode_is_short() -> None:
    """Decode may not grow. Requests wait for its memory, and prefill gets only what decode carries."""
    free = {"autoscaling": {"min_replicas": 1, "max_replicas": 20}, "engine": {"kind": "mock"}}
    world = World(config({"prefill": free, "decode": {"main": {"replicas": 1, "engine": {"kind": "mock"}}}}))
    world.run(120, {"chat": asked(5.0)})
    world.waiting = Waiting(memory=60, decode_tokens=60 * 1500)
    plan = world.run(120, MANY)
    alone = World(config()).run(240, MANY)
    assert plan.short == "decode-main"
    assert plan.targets["prefill"] < alone.targets["prefill"]
    assert "decode carries" in plan.reasons["prefill"]


def test_what_waits_for_decode_asks_for_decode_alone() -> None:
    world, calm = World(config()), World(config())
    world.run(120, SOME)
    world.waiting = Waiting(memory=200, decode_tokens=200 * 8000)
    after, before = world.run(30, SOME).targets, calm.run(150, SOME).targets
    assert after["decode-main"] > before["decode-main"]
    assert after["prefill"] == before["prefill"]


def test_a_backlog_that_outlasts_a_start_asks_for_prefill() -> None:
    world, calm = World(config()), World(config())
    world.run(120, SOME)
    world.waiting, world.backlog_s = Waiting(prefill=500, prefill_tokens=500_000), 120.0
    assert world.run(10, SOME).targets["prefill"] > calm.run(130, SOME).targets["prefill"]


def test_to_zero_and_back() -> None:
    free = {"autoscaling": {"min_replicas": 0, "max_replicas": 4}, "engine": {"kind": "mock"}}
    world = World(config({"prefill": free, "decode": {"main": free}}, idle_s=60.0))
    world.waiting = Waiting(prefill=1, prefill_tokens=1000)
    assert world.run(5).targets == {"prefill": 1, "decode-main": 1}, "a request that waits wakes both"
    world.waiting = Waiting()
    world.run(120, {"chat": asked(1.0)})
    assert world.run(50).targets == {"prefill": 1, "decode-main": 1}, "not idle for long enough"
    assert world.run(300).targets == {"prefill": 0, "decode-main": 0}
    assert world.run(10, {"chat": asked(1.0)}).targets == {"prefill": 1, "decode-main": 1}


def test_a_pool_of_one_class_sleeps_while_others_come() -> None:
    free = {"autoscaling": {"min_replicas": 0, "max_replicas": 4}, "engine": {"kind": "mock"}}
    classes = {"chat": {"ttft_s": 1.0, "tpot_s": 0.05}, "batch": {"rank": 1}}
    decode = {"main": {**free, "classes": ["chat"]}, "large": {**free, "classes": ["batch"]}}
    world = World(config({"prefill": free, "decode": decode}, classes, idle_s=60.0))
    world.run(60, {"chat": asked(1.0), "batch": asked(1.0)})
    world.answered = {"decode-main"}
    assert world.run(900, {"chat": asked(1.0)}).targets["decode-large"] == 0
    assert world.run(10, {"batch": asked(1.0)}).targets["decode-large"] == 1


def test_sizes_stay_within_their_bounds() -> None:
    few = {"autoscaling": {"min_replicas": 2, "max_replicas": 3}, "engine": {"kind": "mock"}}
    world = World(config({"prefill": few, "decode": {"main": few}}))
    assert world.run(600).targets == {"prefill": 2, "decode-main": 2}
    assert world.run(300, MANY).targets == {"prefill": 3, "decode-main": 3}


def test_a_budget_is_kept_and_both_pools_get_their_part() -> None:
    world, free = World(config(max_cost_per_hour=6.0)), World(config())
    plan, wanted = world.run(300, MANY), free.run(300, MANY).targets
    assert sum(wanted.values()) > 6
    assert plan.cost_per_hour == sum(plan.targets.values()) == 6
    assert min(plan.targets.values()) >= 2
    assert any("max_cost_per_hour" in why for why in plan.reasons.values())


def test_a_dry_run_says_what_it_would_do_every_time() -> None:
    world = World(config(dry_run=True))
    plan = world.run(300, MANY)
    assert plan.dry_run
    assert plan.targets["prefill"] > 1 == world.ready["prefill"]
    assert plan.reasons["prefill"].startswith("1 -> ")


def test_a_pool_shrinks_by_one_step_and_only_where_one_less_is_enough() -> None:
    world = World(config())
    world.run(300, MANY)
    world.run(1200, SOME)
    for name in POOLS:
        sizes = [plan.targets[name] for plan in world.plans]
        assert max(before - after for before, after in itertools.pairwise(sizes)) == 1
    assert world.plans[-1].predicted["prefill"].strain <= 1.0
    assert "too few" in world.plans[-1].reasons["prefill"]


def test_of_every_twenty_replicas_of_a_large_pool_one_stops_in_a_plan() -> None:
    free = {"autoscaling": {"min_replicas": 1, "max_replicas": 200}, "engine": {"kind": "mock"}}
    world = World(config({"prefill": free, "decode": {"main": free}}))
    most = world.run(300, {"chat": asked(400.0)}).targets
    least = world.run(400, {"chat": asked(40.0)})
    for name in POOLS:
        sizes = [plan.targets[name] for plan in world.plans]
        fell = {before: before - after for before, after in itertools.pairwise(sizes) if after < before}
        assert all(step <= max(1, before // 20) for before, step in fell.items())
        assert max(fell.values()) == max(1, most[name] // 20)
        assert least.predicted[name].strain <= 1.0
    assert max(most.values()) >= 40


def test_a_pool_that_grew_is_held() -> None:
    world = World(config(hold_intervals=10, shrink_after_s=0.0), start_s=5.0)
    world.run(60, SOME)
    world.run(60, MANY)
    grew = max(number for number, plan in enumerate(world.plans) if "->" in plan.reasons["decode-main"])
    world.run(200, SOME)
    after = [plan.targets["decode-main"] for plan in world.plans[grew : grew + 10]]
    assert min(after) == after[0]
    assert world.plans[-1].targets["decode-main"] < after[0]


def test_start_times_are_measured_and_looked_ahead() -> None:
    """The load grows by the same slope. Where a start takes long, more is started early."""
    sizes = {}
    for start_s in (10.0, 120.0):
        world = World(config(), start_s=start_s)
        for number in range(60):
            world.step({"chat": asked(10.0 + number)})
        sizes[start_s] = world.plans[-1].targets["prefill"]
        assert world.plans[-1].start_s["prefill"] == pytest.approx(start_s, abs=5.0)
    assert sizes[120.0] > sizes[10.0]


def test_a_season_is_expected_again() -> None:
    """Every 600 s the load is fourfold for a while. In the third season the pools have grown before it is."""
    sizes = {}
    for season_s in (None, 600.0):
        world = World(config(season_s=season_s), start_s=30.0)
        world.run(360, SOME)
        for _ in range(2):
            world.run(120, MANY)
            world.run(480, SOME)
        sizes[season_s] = world.plans[-1].targets["prefill"]
    assert sizes[600.0] > sizes[None]


def test_the_classes_of_prefill_are_sized_apart() -> None:
    """Long prompts with a loose objective ask for less than if all had the tight one."""
    classes = {"chat": {"ttft_s": 6.0, "tpot_s": 0.05}, "long": {"ttft_s": 60.0, "tpot_s": 0.05, "rank": 1}}
    tight = {**classes, "long": {"ttft_s": 6.0, "tpot_s": 0.05, "rank": 1}}
    load = {"chat": asked(5.0), "long": asked(0.5, prompt=30_000.0, held=30_500.0)}
    loose_size, tight_size = (
        World(config(classes=each)).run(300, load).targets["prefill"] for each in (classes, tight)
    )
    assert loose_size < tight_size


def test_mixed_pools_are_sized_by_the_sum() -> None:
    free = {"autoscaling": {"min_replicas": 1, "max_replicas": 20}, "engine": {"kind": "mock"}}
    world = World(config({"mixed": {"all": free}}))
    small, large = world.run(300, SOME).targets["mixed-all"], world.run(300, MANY).targets["mixed-all"]
    prompts = {"chat": asked(80.0, output=1.0, held=1001.0)}
    only_prompts = World(config({"mixed": {"all": free}})).run(300, prompts).targets["mixed-all"]
    assert small < only_prompts < large


@pytest.mark.parametrize(("output", "grows"), [(2.0, False), (400.0, True)])
def test_a_burst_of_prompts_on_a_mixed_pool_takes_the_share_that_answers_leave(output: float, grows: bool) -> None:
    """Four replicas are enough before. The same prompts come more: where answers are few, prompts get their time."""
    free = {"autoscaling": {"min_replicas": 4, "max_replicas": 20}, "engine": {"kind": "mock"}}
    world = World(config({"mixed": {"all": free}}))
    before = asked(10.0, output=output, held=1000.0 + 2.0 * output)
    assert world.run(300, {"chat": before}).targets == {"mixed-all": 4}
    plan = world.run(60, {"chat": before.plus(asked(3.0, output=1.0, held=1001.0))})
    assert (plan.targets["mixed-all"] > 4) is grows


def test_answers_on_prefill_replicas_count_as_decodes_whether_or_not_decode_has_any() -> None:
    """A prefill pool that is not strict writes answers, here all of them: no decode replica is up."""
    sizes = {}
    for written in (0.0, 40.0):
        planner = Planner(config())
        prefill = PoolNow("prefill", Role.PREFILL, 2, 2, (), PREFILL, BLOCKS, BLOCK, PLACES, 2048, sessions=written)
        prefill = dataclasses.replace(prefill, answers=written, promised=written * 1600, held=written * 20_000)
        decode = PoolNow("decode-main", Role.DECODE, 1, 1, (), DECODE, BLOCKS, BLOCK, PLACES, 2048)
        for number in range(20):
            plan = planner.plan(Now(5.0 * number, (prefill, decode)))
        sizes[written] = plan.targets["decode-main"]
        assert plan.targets["prefill"] <= 2
    assert sizes[0.0] == 1 < sizes[40.0]


def test_without_a_known_speed_a_pool_keeps_its_size() -> None:
    planner = Planner(config())
    pools = tuple(
        PoolNow(name, role, 3, 3, sessions=5.0, answers=5.0)
        for name, role in zip(POOLS, (Role.PREFILL, Role.DECODE), strict=True)
    )
    for number in range(100):
        plan = planner.plan(Now(5.0 * number, pools, {"chat": asked(100.0 * number)}))
    assert plan.targets == {"prefill": 3, "decode-main": 3}
    assert "not known" in plan.predicted["prefill"].because


def test_without_a_known_speed_a_pool_grows_where_its_places_are_short() -> None:
    pool = PoolNow("decode-main", Role.DECODE, 1, 1, blocks=BLOCKS, block_size=BLOCK, max_sessions=PLACES)
    few, many = Load(answers=0.1 * PLACES), Load(answers=2.0 * PLACES)
    assert predict(pool, few, 1, 0.85).strain == 1.0, "it spares none"
    assert "places" in predict(pool, many, 1, 0.85).because
    assert predict(pool, many, 1, 0.85).strain > 1.0
    assert predict(pool, many, 3, 0.85).strain == 1.0
