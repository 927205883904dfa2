"""The waiting room: bounded, first come first served, no one starves."""

from __future__ import annotations

from functools import partial

import pytest

from deployments.fleet import FleetView, ReplicaView
from deployments.messages import Admit, Decision, Mode, Reject, ReplicaInfo, Role, SessionRequest
from deployments.policy.admission import OVERTAKING_DEPTH, WaitingRoom
from deployments.policy.placement import PlacementSettings, place

PLACE = partial(place, settings=PlacementSettings())


def decode(replica_id: str, total: int, free: int) -> ReplicaView:
    info = ReplicaInfo(replica_id, "decode", Role.DECODE, "node", "engine", 1, total, 99, 10_000)
    return ReplicaView(info, free, 0, 0)


def fleet_of(*ready: ReplicaView) -> FleetView:
    return FleetView(ready, tuple(view.info for view in ready))


def ask(session_id: str, tokens: int) -> SessionRequest:
    return SessionRequest(session_id, tokens - 1, 1, (Mode.DECODE_LOCAL,))


def room_of(*requests: SessionRequest, max_requests: int = 100) -> WaitingRoom:
    room = WaitingRoom(max_requests, timeout_s=30.0, max_retry_after_s=20.0)
    for request in requests:
        assert room.enter(request, 0.0) == len(room)
    return room


def called(room: WaitingRoom, view: FleetView, now_s: float) -> tuple[str, Decision] | None:
    found = room.next_ready(view, PLACE, now_s)
    return (found.request.session_id, found.decision) if found else None


def test_the_room_is_bounded_and_says_when_to_come_back() -> None:
    room = room_of(ask("a", 10), ask("b", 10), max_requests=2)
    assert room.enter(ask("c", 10), 0.0) == Reject("2 requests are waiting already", 1.0)
    assert room.enter(ask("c", 10), 12.0) == Reject("2 requests are waiting already", 12.0)
    assert room.enter(ask("c", 10), 29.0) == Reject("2 requests are waiting already", 20.0)
    assert "c" not in room


def test_entering_twice_raises_and_leaving_is_idempotent() -> None:
    room = room_of(ask("a", 10))
    with pytest.raises(ValueError, match="session a is waiting already"):
        room.enter(ask("a", 10), 1.0)
    assert room.leave("a")
    assert not room.leave("a")
    assert len(room) == 0


def test_first_come_first_served() -> None:
    room = room_of(ask("a", 10), ask("b", 10))
    view = fleet_of(decode("d0", 100, 10))
    found = called(room, view, 1.0)
    assert found is not None
    assert (found[0], isinstance(found[1], Admit)) == ("a", True)
    assert called(room, fleet_of(decode("d0", 100, 0)), 1.0) is None
    assert "b" in room


def test_a_small_request_overtakes_a_large_one_that_cannot_be_placed_yet() -> None:
    room = room_of(ask("large", 80), ask("small", 10))
    found = called(room, fleet_of(decode("d0", 100, 50)), 15.0)
    assert found is not None
    assert found[0] == "small"


def test_after_half_its_timeout_nobody_overtakes_a_request_where_it_could_go() -> None:
    room = room_of(ask("large", 80), ask("small", 10))
    assert called(room, fleet_of(decode("d0", 100, 50)), 15.1) is None
    found = called(room, fleet_of(decode("d0", 100, 80)), 15.2)
    assert found is not None
    assert found[0] == "large"


def test_a_patient_request_does_not_block_replicas_that_could_never_hold_it() -> None:
    room = room_of(ask("large", 80), ask("small", 10))
    found = called(room, fleet_of(decode("d0", 100, 50), decode("d1", 20, 20)), 20.0)
    assert found is not None
    assert isinstance(found[1], Admit)
    assert (found[0], found[1].placement.owner.replica_id) == ("small", "d1")


def test_one_that_can_never_be_placed_is_answered_at_once() -> None:
    room = room_of(ask("huge", 800))
    found = called(room, fleet_of(decode("d0", 100, 0)), 1.0)
    assert found is not None
    assert isinstance(found[1], Reject)
    assert len(room) == 0


def test_only_so_many_are_tried_in_one_pass() -> None:
    room = room_of(*(ask(f"large-{n}", 80) for n in range(OVERTAKING_DEPTH)), ask("small", 10))
    assert called(room, fleet_of(decode("d0", 100, 50)), 1.0) is None


def test_those_who_waited_too_long_are_taken_out() -> None:
    room = room_of(ask("a", 10))
    room.enter(ask("b", 10), 10.0)
    assert room.deadline_s("b") == 40.0
    assert room.expired(29.9) == ()
    assert [request.session_id for request in room.expired(30.0)] == ["a"]
    assert room.expired(30.0) == ()
    assert len(room) == 1
