"""An explanation shows the ways that `joint` weighs, with parts that add up, and why a replica is in none of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView, LiveView
from deployments.messages import Queue, Reject, ReplicaInfo, Role, SessionRequest
from deployments.policy.decider import OpenSession
from deployments.policy.placement.choice import near_s
from deployments.policy.placement.explain import MOST, candidates, decision_of, request_of
from deployments.policy.placement.field import Field, PlacementSettings
from deployments.policy.placement.joint import CANDIDATES, Joint
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.split import ANY
from deployments.step_cost import Coefficients
from tests.deployments.policy.placement.test_joint import Asking, idle_field, sweep

STEPS = {"pool": Coefficients(1e-2, 1e-4, 1e-9, 1e-4, 1e-8)}


def test_the_parts_of_every_cost_add_up_to_it_and_the_choice_is_one_of_the_cheapest() -> None:
    cluster, modes = Asking(CANDIDATES, 2000, 50, seed=3, shared=4), set()
    for _ in range(40):
        request, view = cluster.request(), cluster.allocator.live(cluster.now_s)
        session = OpenSession(request, cluster.allocator.predictors.look(request), cluster.now_s)
        decider = cluster.allocator.decider
        here = decider._field(session, view, decider.classes.resolve(""))
        found, ways = candidates(here), sweep(here)
        assert found["ways"] == len(ways)
        costs = [each["cost_s"] for each in found["candidates"]]
        assert costs == pytest.approx(sorted(ways.values())[:MOST], abs=1e-5)
        for each in found["candidates"]:
            assert sum(each["parts"].values()) == pytest.approx(each["cost_s"], abs=1e-5)
            modes.add(each["mode"])
        choice = Joint().choose(here)
        assert choice is not None
        assert ways[choice.owner, choice.helper] <= costs[0] + near_s(costs[0], here.settings.weights) + 1e-5
        cluster.decide()
        cluster.turn()
    assert modes == {"disaggregated", "decode_local", "prefill_local"}


@pytest.mark.parametrize("holder", ["p", "d", "m"])
def test_the_load_of_an_adapter_counts_once_on_one_replica_and_on_each_of_a_pair(holder: str) -> None:
    here = idle_field(1000, 100, {})
    here.knowledge = replace(here.knowledge, adapter_on=frozenset({holder}), adapter_s=2.0)
    here.outlook.knowledge = here.knowledge
    for each in candidates(here)["candidates"]:
        loads = {each["prefill"], each["decode"]} - {None, holder}
        assert each["parts"].get("adapter", 0.0) == pytest.approx(2.0 * len(loads))
        assert sum(each["parts"].values()) == pytest.approx(each["cost_s"], abs=1e-5)


def test_a_cached_prompt_and_a_known_conversation_are_parts_of_the_price() -> None:
    plain = {each["decode"]: each for each in candidates(idle_field(1600, 10, {}))["candidates"] if not each["prefill"]}
    here = idle_field(1600, 10, {"d": 50})
    here.knowledge = replace(here.knowledge, pinned=frozenset({"d", "gone"}))
    known = {each["decode"]: each for each in candidates(here)["candidates"] if not each["prefill"]}
    assert (plain["d"]["cached_tokens"], known["d"]["cached_tokens"], known["m"]["cached_tokens"]) == (0, 800, 0)
    assert known["d"]["parts"]["first_token"] < plain["d"]["parts"]["first_token"]
    assert known["d"]["parts"]["affinity"] == pytest.approx(-2 * here.settings.weights.pin_s), "both of its sides"
    assert "affinity" not in known["m"]["parts"]


def test_a_load_from_a_tier_is_a_part_of_the_price() -> None:
    here = idle_field(1600, 10, {"d": 50})
    here.knowledge = replace(here.knowledge, resident={"d": 10})
    here.outlook.knowledge = here.knowledge
    for each in candidates(here)["candidates"]:
        is_loaded = (each["prefill"] or each["decode"]) == "d"
        assert (each["parts"].get("brought_cache", 0.0) > 0) is is_loaded
        assert sum(each["parts"].values()) == pytest.approx(each["cost_s"], abs=1e-5)


def fleet(*views: ReplicaView, ready: bool = True, objective_s: float = 10.0, **settings: Any) -> Field:
    """One request of 100 tokens and at most 100 more before these replicas."""
    view = FleetView(views)
    columns = view.columns
    columns.learn(STEPS)
    columns.ready[:] &= ready
    live = LiveView(columns, view.known, (), 0.0)
    request = SessionRequest("a", 100, 100, ANY)
    return Field(request, live, PlacementSettings(**settings), Knowledge(), random.Random(0), (objective_s, 0.05))


def replica(name: str = "r", role: Role = Role.MIXED, blocks: int = 100, **more: Any) -> ReplicaInfo:
    return ReplicaInfo(name, "pool", role, "node", "engine", 16, blocks, 8, 4096, (), 2048, 1000, **more)


@pytest.mark.parametrize(
    ("view", "ready", "why"),
    [
        (ReplicaView(replica(), 100, 0, 0), False, "it takes no sessions now"),
        (ReplicaView(replica(blocks=8), 8, 0, 0), True, "it cannot hold 200 tokens"),
        (ReplicaView(replica(), 100, 8, 0), True, "it runs its 8 sessions"),
        (ReplicaView(replica(), 12, 1, 0), True, "it has 12 free blocks, and 13 are needed"),
        (ReplicaView(replica(), 100, 1, 900, busy_until_s=6.0, behind_s=6.0), True, "its prompts take 6.00 s, over 5"),
        (ReplicaView(replica(role=Role.PREFILL, strict=True), 100, 0, 0), True, "it computes prompts, and no other"),
        (ReplicaView(replica(role=Role.DECODE, strict=True), 100, 0, 0), True, "it writes answers, and no other"),
    ],
)
def test_a_replica_that_is_in_no_way_is_told_with_the_reason(view: ReplicaView, ready: bool, why: str) -> None:
    found = candidates(fleet(view, ready=ready))
    assert found["ways"] == 0
    assert found["candidates"] == []
    ((said),) = found["passed_over"]
    assert said["replica"] == "r"
    assert said["why"].startswith(why)


def test_roles_that_are_kept_show_the_ways_of_the_first_mode_alone() -> None:
    views = (ReplicaView(replica("p", Role.PREFILL), 100, 0, 0), ReplicaView(replica("d", Role.DECODE), 100, 0, 0))
    free = {each["mode"] for each in candidates(fleet(*views))["candidates"]}
    kept = {each["mode"] for each in candidates(fleet(*views, split_always=True))["candidates"]}
    assert kept == {"disaggregated"}
    assert free > kept


def test_many_ways_are_told_up_to_a_number() -> None:
    found = candidates(fleet(*(ReplicaView(replica(f"r{n}"), 100, 0, 0) for n in range(8))))
    assert (found["ways"], len(found["candidates"])) == (8 + 8 * 7, MOST)


def test_decisions_and_requests_as_they_are_told() -> None:
    waits, refused = decision_of(Queue("full", for_turn=True)), decision_of(Reject("no", 2.0, code="queue_full"))
    assert (waits["outcome"], waits["reason"], waits["for_turn"]) == ("waits", "full", True)
    assert (refused["outcome"], refused["code"], refused["retry_after_s"]) == ("refused", "queue_full", 2.0)
    here = fleet(ReplicaView(replica(), 100, 0, 0), objective_s=float("inf"))
    told = request_of(here)
    assert (told["prompt_tokens"], told["max_tokens"], told["ttft_s"], told["tpot_s"]) == (100, 100, None, 0.05)
    assert told["modes"] == [mode.value for mode in ANY]
