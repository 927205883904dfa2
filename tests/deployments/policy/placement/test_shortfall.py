"""Shortfalls: the reason names what is missing, and a request that can never fit is refused."""

from __future__ import annotations

import random
from dataclasses import replace

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView
from deployments.messages import Queue, Reject, ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.field import Field, PlacementSettings
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.shortfall import owner_shortfall, pair_shortfall, shortfall


def view(role: Role, free_blocks: int = 50, sessions: int = 0, ready: bool = True, engine: str = "engine") -> FleetView:
    info = ReplicaInfo(f"{role.value}-0", role.value, role, "node", engine, 16, 100, 8, 2048)
    return FleetView((ReplicaView(info, free_blocks, sessions, 0),) if ready else (), known=(info,))


def here(fleet: FleetView, prompt: int = 800, answer: int = 400) -> Field:
    request = SessionRequest("a", prompt, answer)
    return Field(request, fleet, PlacementSettings(), Knowledge(), random.Random(0), (1e9, 1e9))


def test_an_owner_lacks_replicas_seats_or_blocks() -> None:
    assert owner_shortfall(here(view(Role.DECODE, ready=False))) == Queue(
        "no replica is ready that decodes", unavailable=True
    )
    assert owner_shortfall(here(view(Role.DECODE, sessions=8))) == Queue(
        "every replica that fits runs its most sessions"
    )
    assert owner_shortfall(here(view(Role.DECODE))) == Queue(
        "KV blocks are short: 75 needed, at most 50 free on a replica"
    )


def test_what_no_pool_could_ever_hold_is_refused_with_the_numbers() -> None:
    refusal = owner_shortfall(here(view(Role.DECODE), prompt=1600))
    assert isinstance(refusal, Reject)
    assert "needs 2000 tokens (1600 prompt + 400 answer), and the largest replica holds 1600" in refusal.reason


def test_a_helper_is_missing_or_has_another_engine() -> None:
    assert pair_shortfall(here(view(Role.DECODE))) == Queue("no prefill replica is ready", unavailable=True)
    assert pair_shortfall(here(view(Role.PREFILL))) == Queue("no decode replica is ready", unavailable=True)
    unlike = view(Role.DECODE).ready + view(Role.PREFILL, engine="other").ready
    assert pair_shortfall(here(FleetView(unlike))) == Queue(
        "no ready prefill replica has the same engine as a decode replica with room"
    )


def test_where_all_that_prefill_have_prompts_enough_a_request_waits_for_a_turn() -> None:
    rows = [
        ReplicaView(row.info, row.free_blocks, 0, 0, busy_until_s=3.0)
        for role in (Role.DECODE, Role.PREFILL)
        for row in view(role).ready
    ]
    request, objectives = SessionRequest("a", 400, 200), (2.0, 0.05)
    busy = Field(request, FleetView(tuple(rows)), PlacementSettings(), Knowledge(), random.Random(0), objectives)
    assert shortfall(busy) == Queue("every replica that prefills has more than 1 s of work", for_turn=True)
    patient = Field(request, FleetView(tuple(rows)), PlacementSettings(), Knowledge(), random.Random(0), (8.0, 0.05))
    assert patient.alone.any(), "a class with a longer objective may join the same queue"


def test_a_strict_decode_replica_without_prompts_gives_no_turn() -> None:
    """It computes none that could be split."""
    decode, prefill = view(Role.DECODE).ready[0], view(Role.PREFILL).ready[0]
    decode = decode._replace(info=replace(decode.info, strict=True))
    rows = FleetView((decode, prefill._replace(busy_until_s=3.0)))
    request = SessionRequest("a", 400, 200)
    busy = Field(request, rows, PlacementSettings(), Knowledge(), random.Random(0), (2.0, 0.05))
    missed = shortfall(busy)
    assert isinstance(missed, Queue)
    assert missed.for_turn
