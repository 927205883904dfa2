"""The fleet view: snapshots by version, promises by session, and the hard number that is free."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.fleet.columns import ReplicaView
from deployments.fleet.fleet import Fleet
from deployments.fleet.ledger import Share
from deployments.messages import (
    MOVED,
    NOTHING,
    Finished,
    Forecast,
    Mode,
    Phase,
    Placement,
    ReplicaInfo,
    ReplicaSnapshot,
    Reservation,
    Role,
)

POOLS = {"prefill": Role.PREFILL, "decode-small": Role.DECODE}


def info(replica_id: str, role: Role = Role.DECODE, total_blocks: int = 100) -> ReplicaInfo:
    pool = "prefill" if role is Role.PREFILL else "decode-small"
    return ReplicaInfo(replica_id, pool, role, "node", "engine", 16, total_blocks, 8, 2048)


def snapshot(replica: ReplicaInfo, version: int = 1, **load: Any) -> ReplicaSnapshot:
    return ReplicaSnapshot(replica.replica_id, version, load.pop("phase", Phase.READY), replica, **load)


D0, P0 = info("d0"), info("p0", Role.PREFILL)


def split(session_id: str, blocks: int, epoch: int = 1) -> Placement:
    return Placement(session_id, epoch, Mode.DISAGGREGATED, "split", D0, P0, blocks, 60.0, 600.0)


def make_fleet(slack_s: float = 30.0, unconfirmed_s: float = 30.0) -> Fleet:
    return Fleet(POOLS, stale_s=5.0, slack_s=slack_s, unconfirmed_s=unconfirmed_s)


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
    fleet.reserve(split("a", 30), 100, 0.0)
    fleet.reserve(split("b", 20), 100, 0.0)
    assert seen(fleet, "d0") == ReplicaView(
        D0,
        free_blocks=50,
        sessions=2,
        backlog_tokens=0,
        expected_blocks=50,
        held_tokens=200.0,
        pending=2,
        flow_moves=2.0,
    )
    fleet.update(snapshot(D0, 2, used_blocks=10, running=1, sessions=("a",)), 0.1)
    assert seen(fleet, "d0").free_blocks == 50
    fleet.update(snapshot(D0, 3, used_blocks=60, running=3, sessions=("a", "b")), 0.2)
    assert (seen(fleet, "d0").free_blocks, seen(fleet, "d0").sessions) == (40, 3)


def test_a_session_that_moves_brings_no_prompt_to_the_replica_that_gave_it_up(fleet: Fleet) -> None:
    fleet.reserve(replace(split("a", 30), reason=MOVED), 160, 0.0)
    assert seen(fleet, "p0").flow_prompts == 0.0
    assert seen(fleet, "d0").flow_moves == 1.0


def test_what_was_placed_on_a_replica_that_is_gone_is_forgotten(fleet: Fleet) -> None:
    fleet.reserve(split("a", 30), 100, 0.0)
    fleet.forget("d0")
    fleet.update(snapshot(D0, 9), 1.0)
    assert seen(fleet, "d0").flow_moves == 0.0


def test_a_prefill_replica_carries_the_prompt_until_the_prefill_is_done(fleet: Fleet) -> None:
    fleet.reserve(split("a", 30), 160, 0.0)
    assert seen(fleet, "p0") == ReplicaView(
        P0, free_blocks=89, sessions=1, backlog_tokens=160, prompts=1, flow_prompts=1.0
    )
    assert fleet.prefill_done("a", 1, 0.0)
    assert not fleet.prefill_done("a", 1, 0.0)
    assert not fleet.prefill_done("a", 2, 0.0)
    assert seen(fleet, "p0") == ReplicaView(P0, free_blocks=100, sessions=0, backlog_tokens=0, flow_prompts=1.0)
    assert seen(fleet, "d0").free_blocks == 70


def test_decode_s_sessions_are_pending_until_their_prompts_are_computed_elsewhere(fleet: Fleet) -> None:
    for session in ("a", "b"):
        fleet.reserve(split(session, 30), 160, 0.0)
    assert (seen(fleet, "d0").sessions, seen(fleet, "d0").pending, seen(fleet, "p0").pending) == (2, 2, 0)
    fleet.prefill_done("a", 1, 0.0)
    assert (seen(fleet, "d0").sessions, seen(fleet, "d0").pending) == (2, 1)
    fleet.release("b", 1, 0.0)
    assert (seen(fleet, "d0").sessions, seen(fleet, "d0").pending) == (1, 0)


def _still(view: ReplicaView) -> ReplicaView:
    """A row without what was placed there lately, which a release does not undo."""
    return view._replace(flow_prompts=0.0, flow_s=0.0, flow_moves=0.0, flow_bytes=0.0, flow_at_s=0.0)


def test_release_is_idempotent_and_returns_the_ledger_to_what_it_was(fleet: Fleet) -> None:
    before = fleet.view(0.0)
    fleet.reserve(split("a", 30), 160, 0.0)
    assert not fleet.release("a", 2, 0.0)
    assert fleet.release("a", 1, 0.0)
    assert not fleet.release("a", 1, 0.0)
    assert [_still(view) for view in fleet.view(0.0).ready] == [_still(view) for view in before.ready]
    assert fleet.promises() == ()


def test_released_blocks_count_until_the_engine_has_freed_them(fleet: Fleet) -> None:
    fleet.reserve(split("a", 30), 160, 0.0)
    fleet.update(snapshot(D0, 2, used_blocks=5, sessions=("a",)), 0.1)
    fleet.release("a", 1, 0.0)
    assert fleet.promises() == ()
    assert seen(fleet, "d0").free_blocks == 70
    fleet.update(snapshot(D0, 3), 0.2)
    assert seen(fleet, "d0").free_blocks == 100


def test_what_the_owner_has_ended_counts_no_more_though_its_report_is_yet_to_come(fleet: Fleet) -> None:
    fleet.reserve(split("a", 30), 160, 0.0)
    fleet.update(snapshot(D0, 2, used_blocks=5, sessions=("a",)), 0.1)
    fleet.release("a", 1, 0.0, ended=True)
    assert (seen(fleet, "d0").free_blocks, seen(fleet, "d0").sessions) == (95, 0)
    fleet.update(snapshot(D0, 3), 0.2)
    assert seen(fleet, "d0").free_blocks == 100
    assert not fleet._ledger._promises


def test_a_released_session_that_only_prefill_still_lists_holds_nothing_on_decode(fleet: Fleet) -> None:
    fleet.reserve(split("a", 30), 160, 0.0)
    fleet.update(snapshot(P0, 2, used_blocks=10, sessions=("a",)), 0.1)
    fleet.release("a", 1, 0.0)
    assert seen(fleet, "d0").free_blocks == 100
    assert seen(fleet, "p0").free_blocks == 90


def test_sessions_that_others_placed_count_with_all_that_they_were_promised() -> None:
    fleet = make_fleet()
    theirs = Reservation(30, 20, 100), Reservation(15, 15, 50)
    fleet.update(snapshot(D0, 41, used_blocks=7, running=1, sessions=("x", "y"), reservations=theirs), 0.0)
    fleet.reserve(split("ours", 50), 16, 0.0)
    assert seen(fleet, "d0") == ReplicaView(
        D0,
        free_blocks=5,
        sessions=3,
        backlog_tokens=0,
        expected_blocks=85,
        held_tokens=166.0,
        pending=1,
        flow_moves=1.0,
    )
    fleet.update(snapshot(D0, 42, sessions=("y", "ours"), reservations=(theirs[1], NOTHING)), 0.1)
    assert (seen(fleet, "d0").free_blocks, seen(fleet, "d0").sessions) == (35, 2)
    fleet.forget("d0")
    fleet.update(snapshot(D0, 43, sessions=("ours",)), 0.2)
    assert (seen(fleet, "d0").free_blocks, seen(fleet, "d0").sessions) == (50, 1)


def test_prompts_that_others_placed_are_backlog_in_the_replicas_order_until_they_are_computed(fleet: Fleet) -> None:
    ours = replace(split("ours", 30), forecast=Forecast(prefill_s=1.0), cached_tokens=16)
    fleet.reserve(ours, 160, 0.0)
    theirs = Reservation(11, 0, 0, 200, 2.0)
    both = ("theirs", "ours")
    fleet.update(snapshot(P0, 2, sessions=both, reservations=(theirs, ours.reservation("p0", 160))), 0.5)
    there = seen(fleet, "p0", 0.5)
    assert (there.backlog_tokens, there.busy_until_s, there.behind_s) == (344, 3.5, 1.0)
    fleet.update(snapshot(P0, 3, sessions=both, reservations=(theirs.prefilled(), NOTHING)), 2.5)
    there = seen(fleet, "p0", 2.5)
    assert (there.backlog_tokens, there.busy_until_s, there.behind_s, there.sessions) == (144, 3.5, 0.0, 2)
    fleet.prefill_done("ours", 1, 3.5)
    assert (seen(fleet, "p0", 3.5).busy_until_s, seen(fleet, "p0", 3.5).backlog_tokens) == (0.0, 0)


def test_what_a_placement_takes_is_the_same_for_who_made_it_and_for_who_is_told() -> None:
    """Two ledgers: one promises, the other hears of it from the replicas."""
    one, other = make_fleet(), make_fleet()
    placed = replace(split("a", 30), forecast=Forecast(prefill_s=1.5, output_tokens=40.0), cached_tokens=32)
    one.reserve(placed, 160, 0.0)
    for fleet in (one, other):
        for each in (D0, P0):
            there = (placed.reservation(each.replica_id, 160),)
            fleet.update(snapshot(each, 1, sessions=("a",), reservations=there), 0.0)
    assert [_still(view) for view in one.view(0.0).ready] == [_still(view) for view in other.view(0.0).ready]


def test_promising_twice_raises_and_changes_nothing(fleet: Fleet) -> None:
    fleet.reserve(split("a", 30), 160, 0.0)
    before = fleet.view(0.0)
    with pytest.raises(ValueError, match="session a epoch 1"):
        fleet.reserve(split("a", 10), 160, 0.0)
    assert fleet.view(0.0) == before


def test_a_promise_expires_after_its_session_timeout_and_slack() -> None:
    fleet = make_fleet(slack_s=30.0, unconfirmed_s=1000.0)
    fleet.reserve(split("a", 30), 160, 0.0)
    assert fleet.expire(630.0) == ()
    assert [promise.key for promise in fleet.expire(630.1)] == [("a", 1)]
    assert fleet.promises() == ()


@pytest.mark.parametrize("lister", [D0, P0], ids=["decode", "prefill, decode not called yet"])
def test_a_promise_that_its_replicas_never_list_is_void_early(fleet: Fleet, lister: ReplicaInfo) -> None:
    fleet.reserve(split("listed", 30), 160, 0.0)
    fleet.reserve(split("never", 30), 160, 0.0)
    fleet.update(snapshot(lister, 2, sessions=("listed",)), 29.0)
    assert [promise.key for promise in fleet.expire(31.0)] == [("never", 1)]
    assert [promise.key for promise in fleet.promises()] == [("listed", 1)]


def test_a_forgotten_replica_is_not_placed_on_until_it_reports(fleet: Fleet) -> None:
    fleet.forget("d0")
    fleet.forget("d0")
    assert [view.info for view in fleet.view(0.0).ready] == [P0]
    fleet.update(snapshot(D0, 2), 0.1)
    assert [view.info for view in fleet.view(0.1).ready] == [D0, P0]


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


D1 = info("d1", total_blocks=1000)
SESSIONS = [f"s{number}" for number in range(6)]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["promise", "done", "release", "report", "finished", "late", "lost"]),
        st.sampled_from(SESSIONS),
        st.integers(1, 2),
        st.sampled_from(["d0", "d1", "p0"]),
    ),
    max_size=60,
)


class Messages:
    """A fleet that is told of random events in random order, some of them late or twice."""

    def __init__(self) -> None:
        self.fleet = make_fleet(unconfirmed_s=1e9)
        self.infos = {each.replica_id: each for each in (D0, D1, P0)}
        self.versions = dict.fromkeys(self.infos, 0)
        self.theirs: dict[str, list[str]] = {name: [] for name in self.infos}
        self.logs: dict[str, list[Finished]] = {name: [] for name in self.infos}
        self.now_s = 0.0
        for name in self.infos:
            self.report(name)

    def report(self, name: str, back: int = 0, **load: Any) -> None:
        self.versions[name] += 1
        log = self.logs[name]
        load |= {"finished": tuple(log[-3:]), "finished_version": len(log)}
        listed = load.get("sessions", ())
        load["reservations"] = tuple(Reservation(10, 5, 100, 8, 0.5, 1) for _ in listed)
        newest = self.fleet.snapshots().get(name)
        if newest is None or max(1, self.versions[name] - back) > newest.version:
            known = {key[0] for key, promise in self.fleet._ledger._promises.items() if name in promise.replica_ids}
            self.theirs[name] = [session for session in listed if session not in known]
        self.fleet.update(snapshot(self.infos[name], max(1, self.versions[name] - back), **load), self.now_s)

    def play(self, event: str, session: str, epoch: int, name: str) -> None:
        self.now_s += 0.5
        match event:
            case "promise":
                with contextlib.suppress(ValueError):
                    owner = self.infos[name]
                    forecast = Forecast(prefill_s=1.0, output_tokens=20.0)
                    helper = P0 if owner.role is Role.DECODE else None
                    decode = owner if helper else None
                    placed = Placement(session, epoch, Mode.DISAGGREGATED, "", decode, helper or P0, 30, 1.0, 1e9)
                    self.fleet.reserve(replace(placed, forecast=forecast, cached_tokens=16), 160, self.now_s)
            case "done":
                self.fleet.prefill_done(session, epoch, self.now_s)
            case "release":
                self.fleet.release(session, epoch, self.now_s, ended=name == "d0")
            case "report":
                self.report(name, sessions=tuple(SESSIONS[: 3 * epoch]), used_blocks=epoch, running=epoch)
            case "finished":
                self.logs[name].append(Finished(session, epoch, 5))
                self.report(name)
            case "late":
                self.report(name, back=3, used_blocks=99, sessions=(session,))
            case "lost":
                self.fleet.forget(name)
                self.theirs[name] = []

    def check(self) -> None:
        """The sums that are kept are those of the promises, and what policy reads is what people read."""
        by_hand = {name: Share(name) for name in self.infos}
        for promise in self.fleet._ledger._promises.values():
            for name in set(promise.replica_ids):
                by_hand[name].put(promise, 0.0)
        for name, share in by_hand.items():
            theirs = self.theirs[name]
            share.put_unpromised({each: Reservation(10, 5, 100, 8, 0.5, 1) for each in theirs}, theirs, 0.0)
            kept = self.fleet._ledger._shares.get(name) or Share(name)
            for number in ("sessions", "pending", "blocks", "expected_blocks", "held_tokens", "backlog_tokens"):
                assert getattr(kept, number) == getattr(share, number), (name, number)
            assert kept.work_s == pytest.approx(share.work_s)
        live = self.fleet.live(self.now_s)
        for view in self.fleet.view(self.now_s).ready:
            columns = live.columns
            row = columns.rows[view.info.replica_id]
            assert columns.ready[row]
            assert columns["free_blocks"][row] == view.free_blocks >= 0
            assert columns["held_tokens"][row] == view.held_tokens


@given(EVENTS)
@example([("promise", "s3", 1, "d0"), ("promise", "s3", 2, "d0"), ("report", "s0", 1, "p0"), ("done", "s3", 2, "d0")])
def test_the_ledger_is_exact_after_any_order_of_messages(events: list[tuple[str, str, int, str]]) -> None:
    messages = Messages()
    for event in events:
        messages.play(*event)
        messages.check()
    for session in SESSIONS:
        for epoch in (1, 2):
            messages.fleet.release(session, epoch, messages.now_s)
    for name in messages.infos:
        messages.report(name)
    messages.check()
    assert not messages.fleet._ledger._promises
    assert not messages.fleet._ledger._shares
    assert not messages.fleet._ledger._of_session
    for view in messages.fleet.view(messages.now_s).ready:
        assert (view.free_blocks, view.sessions, view.busy_until_s) == (view.info.total_blocks, 0, 0.0)


OLD_PAIR = (("old", Role.PREFILL, Phase.READY), ("old", Role.DECODE, Phase.READY))


@pytest.mark.parametrize(
    ("others", "loading", "ready"),
    [
        ([], False, False),
        ([("new", Role.DECODE, Phase.LOADING)], False, False),
        ([("old", Role.PREFILL, Phase.READY)], False, False),
        ([("old", Role.DECODE, Phase.READY)], False, False),
        ([*OLD_PAIR], True, True),
        ([("old", Role.PREFILL, Phase.READY), ("older", Role.DECODE, Phase.READY)], False, False),
        ([("old", Role.PREFILL, Phase.READY), ("old", Role.DECODE, Phase.DRAINING)], False, False),
        ([*OLD_PAIR, ("new", Role.DECODE, Phase.LOADING)], False, True),
        ([*OLD_PAIR, ("new", Role.DECODE, Phase.READY)], False, False),
        ([*OLD_PAIR, ("new", Role.DECODE, Phase.DRAINING)], True, True),
    ],
)
def test_a_new_engine_is_out_of_step_while_an_old_pair_serves_and_it_has_no_partner(
    others: list[tuple[str, Role, Phase]], loading: bool, ready: bool
) -> None:
    fleet, new = make_fleet(), replace(info("new-prefill", Role.PREFILL), fingerprint="new")
    fleet.update(snapshot(new, phase=Phase.LOADING), 0.0)
    for number, (engine, role, phase) in enumerate(others):
        fleet.update(snapshot(replace(info(f"r{number}", role), fingerprint=engine), phase=phase), 0.0)
    for phase, expected in ((Phase.LOADING, loading), (Phase.READY, ready)):
        assert fleet.is_out_of_step(new, phase, 0.0) is expected
        assert not fleet.is_out_of_step(new, phase, 5.1), "a silent replica serves no request"


def test_epochs_go_on_from_those_of_another_ledger(fleet: Fleet) -> None:
    assert fleet.next_epoch("s", 0.0, least=3) == 3
    assert fleet.next_epoch("s", 0.0, least=3) == 4
    assert fleet.next_epoch("t", 0.0) == 1
