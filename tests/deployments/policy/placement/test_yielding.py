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
from deployments.policy.placement.letting_go import EASE
from deployments.policy.placement.shortfall import shortfall
from deployments.policy.placement.yielding import MOST_SHARE
from deployments.step_cost import Coefficients

BLOCKS, SEATS = 100, 20
TEN = SessionRequest("a", 80, 80)  # ten blocks
STEP = Coefficients(0.01, 1e-4, 0.0, 0.01, 0.0)


def replica(free_blocks: int, sessions: int, role: Role = Role.DECODE, **load: Any) -> ReplicaView:
    info = ReplicaInfo("d0", role.value, role, "node", "engine", 16, BLOCKS, SEATS, 2048)
    return ReplicaView(info, free_blocks, sessions, 0)._replace(**load)


def field(
    view: ReplicaView, yields: bool = True, request: SessionRequest = TEN, *others: ReplicaView, own: str = "none"
) -> Field:
    columns = Columns(1)
    columns.learn({role.value: STEP for role in Role})
    for each in (view, *others):
        columns.put(each)
    fleet = LiveView(columns, (view.info,), (), 0.0)
    settings = PlacementSettings(own=frozenset({own}))
    return Field(request, fleet, settings, Knowledge(), random.Random(0), (1e9, 1e9), yields)


def prefill(name: str, prompts: int, role: Role = Role.PREFILL) -> ReplicaView:
    view = replica(0, prompts, role, prompts=prompts, busy_until_s=0.05 * prompts)
    return view._replace(info=replace(view.info, replica_id=name))


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


@pytest.mark.parametrize(("objective_s", "expected"), [(0.0, True), (0.08, True), (0.07, False)])
def test_answers_beside_it_keep_their_pace(objective_s: float, expected: bool) -> None:
    """A step takes 10 ms, and 10 ms more for each answer: 30 ms with the one there and this one."""
    assert EASE == 0.4
    assert has_room(replica(90, 1, tpot_s=objective_s)) is expected


@pytest.mark.parametrize(("busy_s", "expected"), [(0.0, True), (0.001, False)])
def test_its_prompt_goes_where_no_other_waits(busy_s: float, expected: bool) -> None:
    view = replica(0, 0, Role.PREFILL, busy_until_s=busy_s)
    assert field(view, False).has_turn.all()
    assert bool(field(view).has_turn.all()) is expected


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ((0,), [True]),
        ((1,), [False]),
        ((0, 0), [True, True]),
        ((1, 0), [False, False]),
        ((1, 1), [False, False]),
        ((1, 0, 1), [False, False, False]),
        ((3, 0, 0), [False, True, True]),
    ],
)
def test_its_prompts_leave_one_replica_to_others(prompts: tuple[int, ...], expected: list[bool]) -> None:
    views = [prefill(f"p{number}", count) for number, count in enumerate(prompts)]
    decode = prefill("d0", 0, Role.DECODE)
    here = field(views[0], True, TEN, *views[1:], decode)
    rows = [here.columns.rows[each.info.replica_id] for each in views]
    assert here.has_turn[rows].tolist() == expected
    assert field(views[0], False, TEN, *views[1:], decode).has_turn.all()


def test_a_pool_of_its_own_is_filled_and_keeps_no_place_for_others() -> None:
    full = replica(10, 19, tpot_s=0.001, busy_until_s=0.5, prompts=1)
    assert not field(full).has_room.any()
    own = field(full, own="decode")
    assert own.has_room.any()
    assert own.has_turn.all()
    assert not field(replica(9, 1), own="decode").has_room.any()
    assert not field(replica(10, 20), own="decode").has_room.any()
    assert not field(replica(10, 1, busy_until_s=1.5), own="decode").has_turn.any()


def test_a_pool_of_its_own_is_not_the_one_that_is_left_to_others() -> None:
    own = prefill("m0", 0, Role.MIXED)
    busy = [prefill("p0", 0), prefill("p1", 1)]
    here = field(own, True, TEN, *busy, own="mixed")
    assert here.has_turn[[here.columns.rows[name] for name in ("m0", "p0", "p1")]].tolist() == [True, False, False]


def test_what_it_lacks_is_said() -> None:
    assert shortfall(field(replica(25, 1))) == Queue("no replica has anything to spare for a class that yields")
    never = shortfall(field(replica(25, 1), request=replace(TEN, prompt_tokens=4000)))
    assert isinstance(never, Reject)
    unready = FleetView((), known=(replica(0, 0).info,))
    away = shortfall(Field(TEN, unready, PlacementSettings(), Knowledge(), random.Random(0), (1e9, 1e9), True))
    assert isinstance(away, Queue)
    assert away.unavailable
