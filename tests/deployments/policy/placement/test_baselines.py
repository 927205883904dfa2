"""The policies to compare with: each picks by its own rule among the replicas that fit."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView
from deployments.messages import ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.baselines import POLICIES, OneByOne, RoundRobin
from deployments.policy.placement.choice import Policy
from deployments.policy.placement.field import Field, PlacementSettings
from deployments.policy.placement.knowledge import Knowledge

LOADS = {"d0": (30, 5, 2000.0), "d1": (240, 1, 100.0), "d2": (30, 3, 500.0)}


def field(hits: dict[str, int] | None = None, client: str = "", prefill_engine: str = "other") -> Field:
    rows = [
        ReplicaView(
            ReplicaInfo(name, "small", Role.DECODE, "node", "engine", 16, 1000, 64, 8192),
            free,
            sessions,
            0,
            held_tokens=held,
        )
        for name, (free, sessions, held) in LOADS.items()
    ]
    rows.append(
        ReplicaView(ReplicaInfo("p0", "prefill", Role.PREFILL, "node", prefill_engine, 16, 100, 8, 8192), 50, 0, 0)
    )
    knowledge = Knowledge(hits=hits or {})
    request = SessionRequest("a", 320, 100, client=client)
    return Field(request, FleetView(tuple(rows)), PlacementSettings(), knowledge, random.Random(0), (1e9, 1e9))


def picks(name: str, count: int = 60, hits: dict[str, int] | None = None) -> Counter[str]:
    policy, here = POLICIES[name](), field(hits)
    chosen = [choice for _ in range(count) if (choice := policy.choose(here)) is not None]
    return Counter(here.columns.info(choice.owner).replica_id for choice in chosen)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("least_tokens", {"d1"}), ("overlap_cost", {"d1"}), ("prefix_affinity", {"d1"}), ("power_of_two", {"d1", "d2"})],
)
def test_loaded_replicas_are_avoided(policy: str, expected: set[str]) -> None:
    assert picks(policy).keys() == expected


def test_round_robin_takes_each_in_its_turn() -> None:
    assert picks("round_robin", 6) == {"d0": 2, "d1": 2, "d2": 2}


def test_weighted_round_robin_follows_free_blocks() -> None:
    assert picks("weighted_round_robin", 100)["d1"] > 60


def test_a_cached_prefix_draws_a_request_to_a_replica_that_is_not_far_busier() -> None:
    assert picks("prefix_affinity", 3, {"d2": 10}) == {"d2": 3}
    assert picks("prefix_affinity", 3, {"d0": 10}) == {"d1": 3}, "d0 is far busier than the others"


def test_a_pair_has_one_engine() -> None:
    choice = OneByOne(RoundRobin()).choose(field())
    assert choice is not None
    assert choice.helper is None, "the only prefill replica has another one"


def chosen(policy: Policy, here: Field) -> tuple[str, str | None]:
    """Owner and helper."""
    choice = policy.choose(here)
    assert choice is not None
    helper = None if choice.helper is None else here.columns.info(choice.helper).replica_id
    return here.columns.info(choice.owner).replica_id, helper


def test_ppd_splits_a_first_turn_and_computes_later_ones_where_most_of_them_is_cached() -> None:
    policy = POLICIES["ppd"]()
    assert chosen(policy, field(prefill_engine="engine")) == ("d1", "p0")
    assert chosen(policy, field({"d0": 9}, prefill_engine="engine")) == ("d1", "p0"), "less than half is cached"
    assert chosen(policy, field({"d0": 10}, prefill_engine="engine")) == ("d0", None)


def test_pinned_splits_a_clients_first_request_and_keeps_the_others_on_its_decode_replica() -> None:
    policy = POLICIES["pinned"]()
    assert chosen(policy, field(client="a", prefill_engine="engine")) == ("d1", "p0")
    assert chosen(policy, field({"d0": 20}, client="a", prefill_engine="engine")) == ("d1", None)
    assert chosen(policy, field(client="b", prefill_engine="engine")) == ("d1", "p0")
    assert chosen(policy, field(prefill_engine="engine")) == ("d1", "p0"), (
        "a client without a name has no first request"
    )
