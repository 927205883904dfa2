"""Relief: which sessions are moved away before a replica's blocks run out, and which are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.fleet.columns import UNKNOWN, ReplicaView
from deployments.messages import Phase, ReplicaInfo, ReplicaSnapshot, Reservation, Role
from deployments.policy.placement.relief import (
    LEAST_STEPS,
    REPORTS,
    REST,
    Relief,
    Room,
    choose_moves,
    missing_blocks,
    room_of,
    running,
)
from deployments.step_cost import Coefficients

BLOCK, STEPS = 16, 16.0
Told = tuple[int, int]
"""Of a session: tokens held (0: not begun), and blocks promised."""


def info(replica_id: str = "d0", total_blocks: int = 100) -> ReplicaInfo:
    return ReplicaInfo(replica_id, "decode-small", Role.DECODE, "node", "engine", BLOCK, total_blocks, 8, 8192)


def snapshot(
    *told: Told, used: int, replica: ReplicaInfo | None = None, bound: tuple[int, ...] = ()
) -> ReplicaSnapshot:
    """`bound`: the sessions, by their place, that cannot be moved."""
    names = tuple(f"s{n}" for n in range(len(told)))
    return ReplicaSnapshot(
        (replica or info()).replica_id,
        1,
        Phase.READY,
        replica or info(),
        used_blocks=used,
        sessions=names,
        reservations=tuple(Reservation(blocks, blocks, held or blocks * BLOCK // 2) for held, blocks in told),
        held_tokens=tuple(held for held, _ in told),
        movable=frozenset(name for n, name in enumerate(names) if n not in bound),
    )


def room(blocks: int = 100, reservable: int = 200, seats: int = 8, replica_id: str = "d1") -> Room:
    return Room(info(replica_id), blocks, reservable, seats)


def chosen(snapshot: ReplicaSnapshot, *rooms: Room, steps: float = STEPS) -> tuple[str, ...]:
    return tuple(choose_moves(snapshot, rooms, steps, lambda session, info: True))


def test_growth_counts_blocks_up_to_what_is_promised() -> None:
    full, near, ends = running(snapshot((160, 60), (165, 60), (159, 10), used=0))
    assert [full.growth(steps, BLOCK) for steps in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [near.growth(steps, BLOCK) for steps in (0, 11, 12)] == [0, 0, 1]
    assert ends.growth(1000, BLOCK) == 0
    assert missing_blocks([full, near, ends], 1, 12, BLOCK) == 1


def test_a_replica_is_pressed_when_its_sessions_need_more_than_is_free() -> None:
    relief, told = Relief(0.1), ((160, 60), (160, 60), (160, 60))
    assert not relief.is_pressed(snapshot(*told, used=97), STEPS, 0.0)
    assert relief.is_pressed(snapshot(*told, used=98), STEPS, 0.0)
    assert not relief.is_pressed(snapshot((0, 60), (0, 60), used=100), STEPS, 5.0), (
        "a session that has not begun takes nothing"
    )
    assert not relief.is_pressed(replace(snapshot(*told, used=100), info=None), STEPS, 5.0)


def test_a_pressed_replica_is_told_once_and_takes_no_newcomers_meanwhile() -> None:
    relief, full = Relief(0.1), snapshot((160, 60), used=100)
    assert relief.is_pressed(full, STEPS, 0.0)
    assert relief.pressed(0.0) == ("d0",)
    assert not relief.is_pressed(full, STEPS, 0.4)
    relief.keep(["d1"], 0.3)
    assert (relief.pressed(0.6), relief.barred(0.6)) == ((), ("d1",)), (
        "its blocks are kept for the sessions that it let go"
    )
    assert relief.barred(0.9) == ()
    assert relief.is_pressed(full, STEPS, 0.6)


def test_the_steps_are_those_until_it_will_have_been_relieved() -> None:
    relief, two = Relief(0.1), replace(snapshot((160, 60), (160, 60), used=50), running_tokens=320)
    takes = Coefficients(0.006, 0.0, 0.0, 0.001, 1 / 320_000)
    assert relief.steps(two, takes) == pytest.approx(REPORTS * 0.1 / 0.009)
    assert relief.steps(two, UNKNOWN) == relief.steps(two, takes._replace(base_s=10.0)) == LEAST_STEPS


def test_the_smallest_that_is_enough_goes() -> None:
    told = (400, 60), (100, 60), (200, 60)
    assert chosen(snapshot(*told, used=98), room()) == ("s1",)


def test_where_one_is_not_enough_the_largest_goes_first_then_the_smallest_that_is() -> None:
    told = tuple((held, 90) for held in (160, 320, 480))
    assert chosen(snapshot(*told, used=100), room(blocks=400), steps=320.0) == ("s2", "s0")


@pytest.mark.parametrize("bound", [(), (1,), (0, 1), (0, 1, 2)])
def test_who_cannot_go_on_elsewhere_and_who_is_about_to_end_stays(bound: tuple[int, ...]) -> None:
    told = (160, 60), (160, 60), (160, 10)
    left = sorted({"s0", "s1"} - {f"s{n}" for n in bound})
    assert sorted(chosen(snapshot(*told, used=100, bound=bound), room(blocks=200), steps=1600.0)) == left


def test_no_session_goes_where_there_is_no_room_for_long_enough() -> None:
    full = snapshot((160, 60), used=100)
    needed = 10 + int(REST * STEPS) // BLOCK
    assert chosen(full) == ()
    assert chosen(full, room(blocks=needed)) == ("s0",)
    assert chosen(full, room(blocks=needed - 1)) == ()
    assert chosen(full, room(reservable=59)) == (), "not even by the ledger"
    assert chosen(full, room(seats=0)) == ()
    assert choose_moves(full, [room()], STEPS, lambda session, info: False) == {}


def test_it_goes_where_there_is_most_room() -> None:
    rooms = [room(60, replica_id="d1"), room(80, replica_id="d2")]
    assert choose_moves(snapshot((160, 60), used=100), rooms, STEPS, lambda session, info: True) == {"s0": "d2"}


def test_room_is_what_a_replicas_own_sessions_will_not_take() -> None:
    told = snapshot((160, 60), (0, 20), used=40)
    view = ReplicaView(info(), 123, 2, 0)
    assert room_of(view, told, STEPS) == Room(info(), 100 - 40 - 1 - 10, 123, 6)


@given(
    told=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 40)), min_size=1, max_size=8),
    free=st.integers(0, 20),
    rooms=st.lists(st.integers(0, 120), max_size=3),
    steps=st.integers(1, 200),
)
def test_what_goes_fits_where_it_goes_and_no_more_goes_than_needed(
    told: list[Told], free: int, rooms: list[int], steps: int
) -> None:
    sessions = tuple((held, -(-held // BLOCK) + more) for held, more in told)
    full = snapshot(*sessions, used=100 - free)
    there = [room(blocks, reservable=80, seats=2, replica_id=f"d{n}") for n, blocks in enumerate(rooms)]
    gone = chosen(full, *there, steps=float(steps))
    assert all(min(each.blocks, each.reservable, each.seats) >= 0 for each in there)
    assert len(set(gone)) == len(gone) <= 2 * len(rooms)
    staying = [each for each in running(full) if each.session_id not in gone[:-1]]
    freed = sum(-(-each.held_tokens // BLOCK) for each in running(full) if each.session_id in gone[:-1])
    if gone:
        assert missing_blocks(staying, free + freed, REST * steps, BLOCK) > 0, "the last one was not needed"
