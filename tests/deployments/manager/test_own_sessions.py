"""What an ingress has placed itself, and what is left of a view for the sessions of others."""

from __future__ import annotations

import pytest

from deployments.manager.calls import Close, PrefillDone, Withdraw
from deployments.manager.own_sessions import OTHERS, OwnSessions, snapshots_of_others
from deployments.messages import ManagerView, Mode, Occupancy, Placement, ReplicaInfo, Reservation, Role

PREFILL = ReplicaInfo("p0", "prefill", Role.PREFILL, "node", "engine", 16, 100, 8, 1000)
DECODE = ReplicaInfo("d0", "decode-main", Role.DECODE, "node", "engine", 16, 100, 8, 1000)


def placement(session_id: str, epoch: int = 1) -> Placement:
    return Placement(session_id, epoch, Mode.DISAGGREGATED, "", DECODE, PREFILL, 10, 60.0, 600.0)


@pytest.fixture
def own() -> OwnSessions:
    made = OwnSessions()
    for session_id, epoch in (("a", 1), ("a", 2), ("b", 1)):
        made.add(placement(session_id, epoch), 32, 5.0)
    return made


def open_now(own: OwnSessions) -> list[tuple[str, int, bool]]:
    return [(each.placement.session_id, each.placement.epoch, each.prefilling) for each in own.promises()]


def test_notices_end_what_they_name(own: OwnSessions) -> None:
    own.note(PrefillDone("a", 2))
    assert open_now(own) == [("a", 1, True), ("a", 2, False), ("b", 1, True)]
    own.note(Close("a", 1, "lost"))
    assert open_now(own) == [("a", 2, False), ("b", 1, True)]
    own.note(Withdraw("b", "cancelled"))
    assert open_now(own) == [("a", 2, False)]
    own.note(Close("a", 2, "finished"))
    assert not own


def test_notices_of_what_is_not_open_change_nothing(own: OwnSessions) -> None:
    before = open_now(own)
    for notice in (
        PrefillDone("a", 3),
        PrefillDone("c", 1),
        Close("a", 3, "lost"),
        Close("c", 1, "lost"),
        Withdraw("c", ""),
    ):
        own.note(notice)
    assert open_now(own) == before


def test_a_view_counts_the_sessions_that_were_open_when_it_came(own: OwnSessions) -> None:
    assert own.by_replica() == {}
    own.seen()
    own.add(placement("later"), 32, 6.0)
    own.note(Close("b", 1, "finished"))
    assert {name: sessions for name, (sessions, _) in own.by_replica().items()} == {"p0": 3, "d0": 3}
    held = own.by_replica()["d0"][1]
    assert held.blocks == 30


def view(sessions: int, **held: int) -> ManagerView:
    return ManagerView("life", (Occupancy(DECODE, sessions, Reservation(**held)),))


def test_others_hold_what_is_not_ours_and_their_share_of_what_is_free() -> None:
    mine = {"d0": (2, Reservation(blocks=20, prefill_tokens=5))}
    (alone,) = snapshots_of_others(view(5, blocks=60, prefill_tokens=8), mine, ingresses=1)
    assert (alone.running, alone.sessions) == (3, (OTHERS,))
    assert alone.reservations == (Reservation(blocks=40, prefill_tokens=3),)
    (shared,) = snapshots_of_others(view(5, blocks=60, prefill_tokens=8), mine, ingresses=4)
    assert shared.reservations == (Reservation(blocks=40 + 30, prefill_tokens=3),)


def test_a_view_older_than_our_sessions_leaves_others_nothing_below_zero() -> None:
    (seen,) = snapshots_of_others(view(1, blocks=10), {"d0": (2, Reservation(blocks=20))}, ingresses=1)
    assert (seen.running, seen.sessions, seen.reservations) == (0, (), ())
