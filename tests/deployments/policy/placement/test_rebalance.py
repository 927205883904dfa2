"""Rebalancing: an answer moves where the rest of it costs less by enough, and nowhere else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView, LiveView
from deployments.messages import ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.field import Field, PlacementSettings
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.rebalance import LOOK_EVERY_S, LOOKS_PER_S, Looks, candidate, saved_s
from deployments.policy.placement.relief import Running
from deployments.policy.placement.split import ANY
from deployments.step_cost import Coefficients

STEPS = Coefficients(5e-2, 1e-3, 1e-9, 2e-2, 1e-7)


def field(left: int = 200, source: dict[str, Any] | None = None, other: dict[str, Any] | None = None) -> Field:
    """An answer of 300 tokens so far on the replica "full", beside 15 others, and a replica with nothing to do."""
    rows = []
    loads = {"full": {"sessions": 15, "held_tokens": 5000.0} | (source or {}), "idle": other or {}}
    for name, role in (("full", Role.DECODE), ("idle", Role.PREFILL)):
        info = ReplicaInfo(name, "pool", role, "node", "engine", 16, 1000, 64, 4096, (), 256, 1000)
        strict = loads[name].pop("strict", False)
        engine = loads[name].pop("engine", "engine")
        row = ReplicaView(replace(info, strict=strict, fingerprint=engine), 500, 0, 0)
        rows.append(row._replace(**loads[name]))
    view = FleetView(tuple(rows))
    columns = view.columns
    columns.learn({"pool": STEPS})
    request = SessionRequest("a", 300, left, ANY)
    knowledge = Knowledge(output_tokens=left, link_bytes_per_s=1e9)
    live = LiveView(columns, view.known, (), 0.0)
    return Field(request, live, PlacementSettings(), knowledge, random.Random(0), (2.0, 0.5))


def saved(here: Field) -> float:
    return saved_s(here, here.columns.rows["full"])


def test_an_idle_replica_takes_an_answer_over_from_a_full_one() -> None:
    assert saved(field()) > 10


def test_an_answer_that_is_about_to_end_stays() -> None:
    assert saved(field(left=2)) == 0


def test_an_answer_stays_where_it_would_gain_little() -> None:
    assert saved(field(source={"sessions": 1, "held_tokens": 300.0}, other={"sessions": 1})) == 0


def test_an_answer_moves_to_no_replica_without_room_that_may_not_decode_or_that_has_another_engine() -> None:
    assert saved(field(other={"free_blocks": 40})) == 0
    assert saved(field(other={"strict": True})) == 0
    assert saved(field(other={"engine": "another"})) == 0


def test_an_answer_moves_away_from_a_prompt_and_to_none() -> None:
    alike = {"sessions": 4, "held_tokens": 1200.0}
    prompt = {"prompts": 1, "busy_until_s": 20.0, "flow_s": 9.0}
    assert saved(field(source=alike, other=alike)) == 0
    assert saved(field(source=alike | prompt | {"sessions": 5}, other=alike)) > 0
    assert saved(field(source=alike, other=alike | prompt)) == 0


def test_nothing_moves_before_step_times_are_known() -> None:
    here = field()
    here.columns.learn({})
    assert saved(here) == 0


def test_the_candidate_has_most_to_write_for_what_would_have_to_move() -> None:
    heavy, light, tied = Running("heavy", 900, 70, True), Running("light", 100, 20, True), Running("tied", 10, 9, False)
    assert candidate([(heavy, 100.0), (light, 90.0), (tied, 500.0)]) == (light, 90.0)
    assert candidate([(light, 3.0)]) is None
    assert candidate([]) is None


def test_a_replica_is_looked_at_now_and_then_and_all_of_them_only_so_often() -> None:
    looks = Looks()
    assert looks.is_due("a", 0.0)
    assert not looks.is_due("b", 0.5 / LOOKS_PER_S), "another had its look just before"
    assert looks.is_due("b", 1.1 / LOOKS_PER_S)
    assert not looks.is_due("a", 0.9 * LOOK_EVERY_S)
    assert looks.is_due("a", 1.1 * LOOK_EVERY_S)
