"""Work that yields: where it may go, and that it leaves what others need."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from deployments.fleet.columns import Columns, ReplicaView
from deployments.fleet.view import FleetView, LiveView
from deployments.messages import Queue, Reject, ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.field import Field, PlacementSettings
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.shortfall import shortfall
from deployments.policy.placement.yielding import LONGEST_QUEUE_S, MOST_SHARE
from deployments.step_cost import Coefficients

BLOCKS, SEATS = 100, 20
TEN = SessionRequest("a", 80, 80)  # ten blocks
STEP = Coefficients(0.01, 1e-4, 0.0, 0.01, 0.0)


def replica(free_blocks: int, sessions: int, role: Role = Role.DECODE, **load: Any) -> ReplicaView:
    info = ReplicaInfo("d0", role.value, role, "node", "engine", 16, BLOCKS, SEATS, 2048)
    return ReplicaView(info, free_blocks, sessions, 0)._replace(**load)


def field(view: ReplicaView, yields: bool = True, request: SessionRequest = TEN) -> Field:
    columns = Columns(1)
    columns.learn({role.value: STEP for role in Role})
    columns.put(view)
    fleet = LiveView(columns, (view.info,), (), 0.0)
    return Field(request, fleet, PlacementSettings(), Knowledge(), random.Random(0), (1e9, 1e9), yields)


def has_room(view: ReplicaView, request: SessionRequest = TEN) -> bool:
    assert field(view, False, request).has_room.any(), "others have room there"
    return bool(field(view, True, request).has_room.any())


@pytest.mark.parametrize(("free", "expected"), [(30, True), (29, False), (10, False)])
def test_it_fills_memory_up_to_a_mark(free: int, expected: bool) -> None:
    assert round(BLOCKS * (1 - MOST_SHARE)) == 20
    assert has_room(replica(free, 1)) is expected


@pytest.mark.parametrize(("sessions", "expected"), [(15, True), (16, False), (19, False)])
def test_it_takes_seats_up_to_a_mark(sessions: int, expected: bool) -> None:
    assert has_room(replica(90, sessions)) is expected


def test_an_empty_replica_takes_any_that_fits() -> None:
    large = replace(TEN, prompt_tokens=1000, max_tokens=580)
    assert has_room(replica(BLOCKS, 0), large)
    assert not has_room(replica(BLOCKS, 1), large)


@pytest.mark.parametrize(("objective_s", "expected"), [(0.0, True), (0.035, True), (0.025, False)])
def test_answers_beside_it_keep_their_pace(objective_s: float, expected: bool) -> None:
    """A step takes 10 ms, and 10 ms more for each answer: 30 ms with the one there and this one."""
    assert has_room(replica(90, 1, tpot_s=objective_s)) is expected


@pytest.mark.parametrize(("busy_s", "expected"), [(0.0, True), (LONGEST_QUEUE_S, True), (2 * LONGEST_QUEUE_S, False)])
def test_its_prompt_goes_where_hardly_any_other_waits(busy_s: float, expected: bool) -> None:
    view = replica(0, 0, Role.PREFILL, busy_until_s=busy_s)
    assert field(view, False).has_turn.all()
    assert bool(field(view).has_turn.all()) is expected


def test_what_it_lacks_is_said() -> None:
    assert shortfall(field(replica(25, 1))) == Queue("no replica has anything to spare for a class that yields")
    never = shortfall(field(replica(25, 1), request=replace(TEN, prompt_tokens=4000)))
    assert isinstance(never, Reject)
    unready = FleetView((), known=(replica(0, 0).info,))
    away = shortfall(Field(TEN, unready, PlacementSettings(), Knowledge(), random.Random(0), (1e9, 1e9), True))
    assert isinstance(away, Queue)
    assert away.unavailable
