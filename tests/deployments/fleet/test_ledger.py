"""The ledger: promises by key, session and replica, and the sums on each replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.fleet.ledger import Ledger, Share
from deployments.fleet.promise import Taken
from deployments.messages import Finished, Forecast, Mode, Placement, ReplicaInfo, Reservation, Role

D0 = ReplicaInfo("d0", "decode-small", Role.DECODE, "node", "engine", 16, 100, 8, 2048)
P0 = ReplicaInfo("p0", "prefill", Role.PREFILL, "node", "engine", 16, 100, 8, 2048)


def split(session_id: str, epoch: int = 1, prefill_s: float = 1.0) -> Placement:
    forecast = Forecast(prefill_s=prefill_s)
    return Placement(session_id, epoch, Mode.DISAGGREGATED, "split", D0, P0, 30, 60.0, 600.0, forecast=forecast)


@pytest.fixture
def changed() -> dict[str, None]:
    return {}


@pytest.fixture
def ledger(changed: dict[str, None]) -> Ledger:
    return Ledger(changed, slack_s=30.0, unconfirmed_s=20.0)


def test_a_placement_is_reserved_on_both_replicas_until_it_is_removed(ledger: Ledger, changed: dict[str, None]) -> None:
    ledger.reserve(split("a"), 160, 0.0)
    assert (ledger.share("d0").blocks, ledger.share("d0").pending, ledger.share("d0").backlog_tokens) == (30, 1, 0)
    assert (ledger.share("p0").blocks, ledger.share("p0").pending, ledger.share("p0").backlog_tokens) == (11, 0, 160)
    assert changed.keys() == {"d0", "p0"}
    changed.clear()
    released = ledger.release("a", 1, 1.0, ended=False)
    assert released is not None
    assert ledger.release("a", 1, 1.0, ended=False) is None
    assert ledger.promises() == ledger.promises_of("a") == ()
    assert ledger.share("d0").blocks == 0
    assert ledger.share("d0").released.keys() == {("a", 1)}
    ledger.remove(released, 1.0)
    assert ledger.share("d0").is_empty
    assert changed.keys() == {"d0", "p0"}


def test_it_knows_what_may_be_let_go(ledger: Ledger) -> None:
    yields = replace(split("a"), yields=True)
    for placement in (yields, split("b"), replace(yields, session_id="c")):
        ledger.reserve(placement, 160, 0.0)
    assert ledger.yielding == {}, "their prompts are not computed"
    for name in "abc":
        ledger.prefill_done(name, 1, 1.0)
    assert ledger.yielding.keys() == {"d0"}, "and not on prefill"
    assert ledger.yielding["d0"].yielding.keys() == {("a", 1), ("c", 1)}
    assert ledger.yielding["d0"].may_let_go == Taken(2, 320, 60, 60)
    ledger.finish("d0", [Finished("a", 1, 5)], 2.0)
    assert ledger.yielding["d0"].may_let_go == Taken(1, 160, 30, 30)
    released = ledger.release("c", 1, 3.0, ended=False)
    assert released is not None
    assert ledger.yielding == {}
    ledger.remove(released, 3.0)
    assert ledger.yielding == {}


def test_a_session_and_epoch_are_reserved_once(ledger: Ledger) -> None:
    ledger.reserve(split("a"), 160, 0.0)
    with pytest.raises(ValueError, match="session a epoch 1 has a promise already"):
        ledger.reserve(split("a"), 160, 0.0)
    ledger.reserve(split("a", epoch=2), 160, 0.0)
    assert [promise.key for promise in ledger.promises_of("a")] == [("a", 1), ("a", 2)]


def test_prefilled_prompts_leave_the_backlog_and_the_next_one_begins(ledger: Ledger) -> None:
    ledger.reserve(split("a", prefill_s=1.0), 160, 0.0)
    ledger.reserve(split("b", prefill_s=2.0), 160, 0.5)
    assert (ledger.share("p0").begun_s, ledger.share("p0").work_s) == (0.0, 3.0)
    assert ledger.prefill_done("a", 1, 4.0)
    assert not ledger.prefill_done("a", 1, 4.0)
    assert (ledger.share("p0").begun_s, ledger.share("p0").work_s) == (4.0, 2.0)
    assert ledger.share("p0").blocks == 11
    assert ledger.share("d0").pending == 1


def test_a_finished_part_of_the_owner_holds_nothing_and_one_of_the_helper_only_ends_the_prefill(
    ledger: Ledger,
) -> None:
    ledger.reserve(split("a"), 160, 0.0)
    ledger.finish("p0", [Finished("a", 1, 1), Finished("unknown", 1, 1)], 1.0)
    assert (ledger.share("p0").blocks, ledger.share("d0").blocks, ledger.share("d0").pending) == (0, 30, 0)
    ledger.finish("d0", [Finished("a", 1, 5)], 2.0)
    assert ledger.share("d0").blocks == 0
    assert len(ledger.promises()) == 1, "it is not closed yet"


def test_sessions_of_other_ledgers_count_while_their_replica_lists_them(ledger: Ledger) -> None:
    ledger.reserve(split("ours"), 160, 0.0)
    theirs = Reservation(blocks=7, prefill_tokens=50, prefill_s=0.5)
    ledger.put_unpromised("p0", ("theirs", "ours"), (theirs, Reservation(99)), 1.0)
    share = ledger.share("p0")
    assert (share.blocks, share.backlog_tokens, share.work_s) == (11 + 7, 160 + 50, 1.5)
    assert list(share.prompts) == [("theirs", 0), ("ours", 1)], "in the order of the replica's prefills"
    ledger.put_unpromised("p0", ("ours",), (), 2.0)
    assert (ledger.share("p0").blocks, ledger.share("p0").work_s) == (11, 1.0)


def test_promises_end_when_no_replica_confirms_them_or_they_outlive_their_session(ledger: Ledger) -> None:
    ledger.reserve(split("listed"), 160, 0.0)
    ledger.reserve(split("never"), 160, 0.0)
    ledger.confirm("d0", {"listed"}, 15.0)
    assert [promise.placement.session_id for promise in ledger.expire(21.0)] == ["never"]
    for now_s in range(30, 640, 10):
        ledger.confirm("d0", {"listed"}, float(now_s))
    assert ledger.expire(629.0) == ()
    assert [promise.placement.session_id for promise in ledger.expire(631.0)] == ["listed"]


def test_epochs_are_remembered_while_the_session_is_open(ledger: Ledger) -> None:
    assert [ledger.next_epoch("a", 0.0), ledger.next_epoch("a", 0.0), ledger.next_epoch("b", 0.0, least=4)] == [1, 2, 4]
    ledger.reserve(split("a", epoch=2), 160, 0.0)
    ledger.forget_epochs(before_s=1.0)
    assert (ledger.next_epoch("a", 1.0), ledger.next_epoch("b", 1.0)) == (3, 1)


def test_a_share_starts_its_sum_of_seconds_anew_when_no_prompt_is_left() -> None:
    share, ledger = Share("p0"), Ledger({}, 30.0, 30.0)
    for number in range(50):
        ledger.reserve(split(str(number), prefill_s=0.1), 160, 0.0)
    for promise in ledger.promises():
        share.put(promise, 0.0)
    for promise in ledger.promises():
        share.remove(promise, 1.0)
    assert share.work_s == 0.0
