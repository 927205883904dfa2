"""The fleet view: snapshots by version, promises by session, and the hard number that is free."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.fleet import Fleet
from deployments.fleet_view import ReplicaView
from deployments.messages import Mode, Phase, Placement, ReplicaInfo, ReplicaSnapshot, Role

POOLS = {"prefill": Role.PREFILL, "decode-small": Role.DECODE}


def info(replica_id: str, role: Role = Role.DECODE, total_blocks: int = 100) -> ReplicaInfo:
    pool = "prefill" if role is Role.PREFILL else "decode-small"
    return ReplicaInfo(replica_id, pool, role, "node", "engine", 16, total_blocks, 8, 2048)


def snapshot(replica: ReplicaInfo, version: int = 1, **load: Any) -> ReplicaSnapshot:
    return ReplicaSnapshot(replica.replica_id, version, load.pop("phase", Phase.READY), replica, **load)


D0, P0 = info("d0"), info("p0", Role.PREFILL)


def split(session_id: str, blocks: int, epoch: int = 1) -> Placement:
    return Placement(session_id, epoch, Mode.DISAGGREGATED, "split", D0, P0, blocks, 60.0, 600.0)


def make_fleet(**options: float) -> Fleet:
    return Fleet(POOLS, **{"stale_s": 5.0, **options})


@pytest.fixture
def fleet() -> Fleet:
    fleet = make_fleet()
    fleet.update(snapshot(D0), 0.0)
    fleet.update(snapshot(P0), 0.0)
    return fleet


def seen(fleet: Fleet, replica_id: str, now_s: float = 0.0) -> ReplicaView:
    return {view.info.replica_id: view for view in fleet.view(now_s).ready}[replica_id]


def test_older_versions_are_ignored(fleet: Fleet) -> None:
    fleet.update(snapshot(D0, 3, used_blocks=30), 1.0)
    fleet.update(snapshot(D0, 2, used_blocks=99), 2.0)
    assert seen(fleet, "d0").free_blocks == 70
    assert fleet.phases(2.0)["decode-small"]["d0"].age_s == 1.0


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.DRAINING])
def test_a_replica_that_is_not_ready_is_not_placed_on(fleet: Fleet, phase: Phase) -> None:
    fleet.update(snapshot(D0, 2, phase=phase), 0.0)
    assert [view.info.replica_id for view in fleet.view(0.0).ready] == ["p0"]


def test_a_silent_replica_goes_stale_and_is_known_still(fleet: Fleet) -> None:
    view = fleet.view(5.1)
    assert view.ready == ()
    assert {known.replica_id for known in view.known} == {"d0", "p0"}
    assert not fleet.phases(5.1)["decode-small"]["d0"].fresh


def test_free_is_the_total_less_the_more_of_promised_and_used(fleet: Fleet) -> None:
    fleet.promise(split("a", 30), 100, 0.0)
    fleet.promise(split("b", 20), 100, 0.0)
    assert seen(fleet, "d0") == ReplicaView(
        D0, free_blocks=50, sessions=2, backlog_tokens=0, expected_blocks=50, held_tokens=200.0
    )
    fleet.update(snapshot(D0, 2, used_blocks=10, running=1, sessions=("a",)), 0.1)
    assert seen(fleet, "d0").free_blocks == 50
    fleet.update(snapshot(D0, 3, used_blocks=60, running=3, sessions=("a", "b")), 0.2)
    assert (seen(fleet, "d0").free_blocks, seen(fleet, "d0").sessions) == (40, 3)


def test_a_prefill_replica_carries_the_prompt_until_the_prefill_is_done(fleet: Fleet) -> None:
    fleet.promise(split("a", 30), 160, 0.0)
    assert seen(fleet, "p0") == ReplicaView(P0, free_blocks=89, sessions=1, backlog_tokens=160)
    assert fleet.prefill_done("a", 1, 0.0)
    assert not fleet.prefill_done("a", 1, 0.0)
    assert not fleet.prefill_done("a", 2, 0.0)
    assert seen(fleet, "p0") == ReplicaView(P0, free_blocks=100, sessions=0, backlog_tokens=0)
    assert seen(fleet, "d0").free_blocks == 70


def test_release_is_idempotent_and_returns_the_ledger_to_what_it_was(fleet: Fleet) -> None:
    before = fleet.view(0.0)
    fleet.promise(split("a", 30), 160, 0.0)
    assert not fleet.release("a", 2, 0.0)
    assert fleet.release("a", 1, 0.0)
    assert not fleet.release("a", 1, 0.0)
    assert fleet.view(0.0) == before
    assert fleet.promises() == ()


def test_released_blocks_count_until_the_engine_has_freed_them(fleet: Fleet) -> None:
    fleet.promise(split("a", 30), 160, 0.0)
    fleet.update(snapshot(D0, 2, used_blocks=5, sessions=("a",)), 0.1)
    fleet.release("a", 1, 0.0)
    assert fleet.promises() == ()
    assert seen(fleet, "d0").free_blocks == 70
    fleet.update(snapshot(D0, 3), 0.2)
    assert seen(fleet, "d0").free_blocks == 100


def test_a_released_session_that_only_prefill_still_lists_holds_nothing_on_decode(fleet: Fleet) -> None:
    fleet.promise(split("a", 30), 160, 0.0)
    fleet.update(snapshot(P0, 2, used_blocks=10, sessions=("a",)), 0.1)
    fleet.release("a", 1, 0.0)
    assert seen(fleet, "d0").free_blocks == 100
    assert seen(fleet, "p0").free_blocks == 90


def test_after_a_restart_unknown_sessions_count_with_what_is_used() -> None:
    fleet = make_fleet()
    fleet.update(snapshot(D0, 41, used_blocks=40, running=2, sessions=("x", "y")), 0.0)
    assert (seen(fleet, "d0").free_blocks, seen(fleet, "d0").sessions) == (60, 2)
    fleet.promise(split("new", 50), 16, 0.0)
    assert (seen(fleet, "d0").free_blocks, seen(fleet, "d0").sessions) == (10, 3)


def test_promising_twice_raises_and_changes_nothing(fleet: Fleet) -> None:
    fleet.promise(split("a", 30), 160, 0.0)
    before = fleet.view(0.0)
    with pytest.raises(ValueError, match="session a epoch 1"):
        fleet.promise(split("a", 10), 160, 0.0)
    assert fleet.view(0.0) == before


def test_a_promise_expires_after_its_session_timeout_and_slack() -> None:
    fleet = make_fleet(slack_s=30.0, unconfirmed_s=1000.0)
    fleet.promise(split("a", 30), 160, 0.0)
    assert fleet.expire(630.0) == ()
    assert [promise.key for promise in fleet.expire(630.1)] == [("a", 1)]
    assert fleet.promises() == ()


@pytest.mark.parametrize("lister", [D0, P0], ids=["decode", "prefill, decode not called yet"])
def test_a_promise_that_its_replicas_never_list_is_void_early(fleet: Fleet, lister: ReplicaInfo) -> None:
    fleet.promise(split("listed", 30), 160, 0.0)
    fleet.promise(split("never", 30), 160, 0.0)
    fleet.update(snapshot(lister, 2, sessions=("listed",)), 29.0)
    assert [promise.key for promise in fleet.expire(31.0)] == [("never", 1)]
    assert [promise.key for promise in fleet.promises()] == [("listed", 1)]


def test_a_forgotten_replica_is_not_placed_on_until_it_reports(fleet: Fleet) -> None:
    fleet.forget("d0")
    fleet.forget("d0")
    assert fleet.view(0.0).of(Role.DECODE) == ()
    fleet.update(snapshot(D0, 2), 0.1)
    assert len(fleet.view(0.1).of(Role.DECODE)) == 1


def test_a_pool_keeps_its_shape_when_its_replicas_are_gone(fleet: Fleet) -> None:
    fleet.expire(61.0)
    assert fleet.phases(61.0) == {"prefill": {}, "decode-small": {}}
    assert {known.pool for known in fleet.view(61.0).known} == {"prefill", "decode-small"}


def test_pools_that_never_reported_a_shape_are_silent() -> None:
    fleet = make_fleet()
    fleet.update(ReplicaSnapshot("d0", 1, Phase.LOADING, pool="decode-small"), 0.0)
    assert fleet.view(0.0).silent == (Role.DECODE, Role.PREFILL)
    assert fleet.phases(1.0)["decode-small"]["d0"].phase is Phase.LOADING
    fleet.update(snapshot(D0, 2), 0.0)
    assert fleet.view(0.0).silent == (Role.PREFILL,)


def test_epochs_start_at_one_and_grow_with_each_attempt(fleet: Fleet) -> None:
    assert [fleet.next_epoch("a", 0.0), fleet.next_epoch("a", 1.0), fleet.next_epoch("b", 1.0)] == [1, 2, 1]
    fleet.expire(100.0)
    assert fleet.next_epoch("a", 100.0) == 1
