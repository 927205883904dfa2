"""Sessions of classes that yield give way to others: who goes, what the books say of it, and that it has an end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from configs.schema import ClassConfig
from deployments.messages import Admit, Finished, Phase, Placement, ReplicaSnapshot, Reservation
from deployments.policy.allocator import Allocator
from deployments.policy.explain import explain
from deployments.policy.giving_way import LATE_S
from deployments.policy.placement.letting_go import MOST_TIMES
from deployments.policy.placement.split import ONE_ENGINE
from tests.deployments.policy.test_allocator import NIGHT, PRIOR, admitted, allocator_of, ask, info, report

QUICK: dict[str, Any] = {
    "classes": {"chat": ClassConfig(tpot_s=0.05), "night": ClassConfig(rank=1, yields=True)},
    "default_class": "chat",
}
D0 = info("d0", total_blocks=100)


def night(allocator: Allocator, session_id: str, prompt: int = 160, answer: int = 160, **more: Any) -> Placement:
    """A session that yields, and whose prompt is computed."""
    placement = admitted(allocator, ask(session_id, prompt, answer, priority="night", **more))
    assert allocator.prefill_done(session_id, placement.epoch, 0.0)
    return placement


def filled(**placement: Any) -> Allocator:
    """20 of 100 blocks are free: four sessions that yield have 20 each, and hold 30, 20, 60 and 40 more tokens."""
    allocator = allocator_of(info("p0"), D0, **(placement or NIGHT))
    for number, more in enumerate((30, 20, 60, 40)):
        assert night(allocator, f"n{number}", 160 + more, 160 - more).yields
    return allocator


def free_blocks(allocator: Allocator) -> int:
    row = allocator.fleet.row("d0")
    assert row is not None
    return row.free_blocks


def listed(version: int, *sessions: str, **more: Any) -> ReplicaSnapshot:
    reservations = (Reservation(20, 20, 240),) * len(sessions)
    return ReplicaSnapshot("d0", version, Phase.READY, D0, sessions=sessions, reservations=reservations, **more)


def test_a_session_without_room_gets_that_of_those_that_yield_the_least_held_first() -> None:
    allocator = filled()
    assert admitted(allocator, ask("first")).let_go == ()
    assert free_blocks(allocator) == 0
    assert admitted(allocator, ask("second")).let_go == ("n1",)
    assert admitted(allocator, ask("third", 300, 340)).let_go == ("n0", "n3")
    assert free_blocks(allocator) == 0, "it is never more than there is"
    assert admitted(allocator, ask("fourth")).let_go == ("n2",)
    assert allocator.open(ask("fifth"), 0.0) is None, "none is left to give way"
    assert allocator.giving_way.count == 4


def test_what_the_replica_reports_of_them_counts() -> None:
    allocator = filled()
    report(allocator, D0, 2, sessions=("n0", "n1", "n2", "n3"), held_tokens=(200, 310, 300, 300))
    admitted(allocator, ask("first"))
    assert admitted(allocator, ask("second")).let_go == ("n0",)


def test_a_prompt_that_is_not_computed_is_not_let_go() -> None:
    allocator = allocator_of(info("p0"), D0, **NIGHT)
    for number in range(3):
        night(allocator, f"n{number}")
    admitted(allocator, ask("n3", priority="night"))
    admitted(allocator, ask("first"))
    assert admitted(allocator, ask("second", 480, 480)).let_go == ("n0", "n1", "n2")
    assert allocator.open(ask("third"), 0.0) is None
    allocator.prefill_done("n3", 1, 1.0)
    ((name, answer),) = allocator.answers(1.0)
    assert name == "third"
    assert isinstance(answer, Admit)
    assert answer.placement.let_go == ("n3",)


def test_it_frees_places_too() -> None:
    few = replace(D0, max_sessions=5)
    allocator = allocator_of(info("p0"), few, **NIGHT)
    for number in range(4):
        night(allocator, f"n{number}", 16 + number, 16)
    assert admitted(allocator, ask("first", 16, 16)).let_go == ()
    assert admitted(allocator, ask("second", 16, 16)).let_go == ("n0",)


def test_it_keeps_the_pace_of_others() -> None:
    """A step takes 5 ms and 2 ms for each answer: 21 are within 95% of the objective, and 7 within two fifths."""
    slow = (PRIOR[0], PRIOR[1], 0.0, 0.002, 0.0)
    large = info("d0", prior=slow)
    allocator = allocator_of(info("p0", prior=slow), large, **QUICK)
    admitted(allocator, ask("chat-0"))
    allocator.prefill_done("chat-0", 1, 0.0)
    for number in range(6):
        night(allocator, f"n{number}")
    assert allocator.open(ask("n6", priority="night"), 0.0) is None, "they leave some ease"
    for number in range(1, 15):
        assert admitted(allocator, ask(f"chat-{number}")).let_go == (), "which these take"
    assert len(admitted(allocator, ask("chat-15")).let_go) == 1


def test_the_books_count_it_as_gone_at_once_and_as_closed_when_it_closes() -> None:
    allocator = filled()
    report(allocator, D0, 2, sessions=("n0", "n1", "n2", "n3"), used_blocks=80, running=4)
    for name in ("first", "second"):
        admitted(allocator, ask(name))
    assert free_blocks(allocator) == 0
    assert len(allocator.fleet.promises_of("n1")) == 1
    assert allocator.close("n1", 1, "moved", 0.1)
    assert allocator.fleet.promises_of("n1") == ()
    gone = (Finished("n1", 1, 20),)
    allocator.report(listed(3, "n0", "n2", "n3", "first", finished=gone, finished_version=1), 0.2)
    assert free_blocks(allocator) == 0
    for name, epoch in (("first", 1), ("second", 1), ("n0", 1), ("n2", 1), ("n3", 1)):
        allocator.close(name, epoch, "stop", 0.3, 5)
    allocator.report(listed(4), 0.4)
    assert free_blocks(allocator) == 100
    assert allocator.fleet.promises() == ()


def test_it_waits_for_the_others_and_then_goes_on_where_its_kv_is() -> None:
    allocator = filled()
    first, second = admitted(allocator, ask("first")), admitted(allocator, ask("second"))
    assert second.let_go == ("n1",)
    allocator.close("n1", 1, "moved", 0.1)
    rest = ask("n1", 190, 130, priority="night", attempt=2, moved_from="d0", progressed=True)
    assert allocator.open(rest, 0.1) is None
    for replica, sessions in ((D0, ("n0", "n2", "n3", "first", "second")), (info("p0"), ())):
        report(allocator, replica, 2, 200.0, sessions=sessions)
    assert allocator.answers(200.0) == [], "it waits for longer than others"
    assert allocator.open(ask("n9", priority="night"), 200.0) is None
    assert allocator.room.pressing == 0
    allocator.close("second", second.epoch, "stop", 200.1, 5, ended=True)
    assert allocator.answers(200.1) == [], "a fifth of the memory stays free"
    allocator.close("first", first.epoch, "stop", 200.2, 5, ended=True)
    ((name, answer),) = allocator.answers(200.2)
    assert name == "n1", "before those that have nothing"
    assert isinstance(answer, Admit)
    assert (answer.placement.owner.replica_id, answer.placement.epoch, answer.placement.yields) == ("d0", 2, True)


def test_where_another_replica_has_room_it_moves_with_its_kv() -> None:
    allocator = allocator_of(info("p0"), D0, **NIGHT)
    for number in range(4):
        night(allocator, f"n{number}")
    admitted(allocator, ask("first"))
    gone = admitted(allocator, ask("second")).let_go
    report(allocator, info("d1", total_blocks=100), 1)
    allocator.close(gone[0], 1, "moved", 0.1)
    moved = admitted(allocator, ask(gone[0], 190, 130, priority="night", attempt=2, moved_from="d0"), 0.1)
    assert (moved.reason, moved.owner.replica_id, moved.prefiller.replica_id) == ("moved", "d1", "d0")
    assert moved.yields


def test_what_was_let_go_often_stays() -> None:
    allocator = allocator_of(info("p0"), D0, **NIGHT)
    for number in range(4):
        night(allocator, f"n{number}", attempt=MOST_TIMES + (number != 0))
    admitted(allocator, ask("first"))
    assert admitted(allocator, ask("second")).let_go == ("n0",)
    assert allocator.open(ask("third"), 0.0) is None


def test_what_cannot_go_on_elsewhere_stays() -> None:
    allocator = allocator_of(info("p0"), D0, **NIGHT)
    assert not night(allocator, "n0", allowed=ONE_ENGINE).yields


def test_one_that_was_not_told_of_in_time_is_named_in_the_answer_to_a_report() -> None:
    allocator = filled()
    for name in ("first", "second"):
        admitted(allocator, ask(name))
    late = LATE_S + 0.1
    assert allocator.sessions_to_move(listed(2, "n0", "n1"), 0.1) == ()
    assert allocator.sessions_to_move(listed(3, "n0", "n1"), late) == ("n1",)
    assert allocator.sessions_to_move(listed(4, "n0"), late) == ()
    assert allocator.sessions_to_move(listed(5, "n0", "n1"), 2 * late) == (), "it was gone, and has come again"


def test_one_that_comes_back_at_once_is_not_taken_for_one_that_has_not_gone() -> None:
    allocator = filled()
    for name in ("first", "second"):
        admitted(allocator, ask(name))
    for name, epoch in (("first", 1), ("second", 1), ("n1", 1)):
        allocator.close(name, epoch, "stop", 0.0)
    report(allocator, D0, 2, sessions=("n0", "n1", "n2", "n3"))
    back = admitted(allocator, ask("n1", 190, 130, priority="night", attempt=2), 0.01)
    assert back.owner.replica_id == "d0"
    assert allocator.sessions_to_move(listed(3, "n0", "n1", "n2", "n3"), 2 * LATE_S) == ()


def test_a_replica_that_is_lost_owes_nothing() -> None:
    allocator = filled()
    for name in ("first", "second"):
        admitted(allocator, ask(name))
    allocator.lost("d0", 0.1)
    assert allocator.sessions_to_move(listed(9, "n1"), 5.0) == ()


def test_a_request_is_told_that_it_would_have_room() -> None:
    allocator = filled()
    admitted(allocator, ask("first"))
    decision = explain(allocator, ask("second"), 0.0)["decision"]
    assert decision["outcome"] == "placed", decision
    assert free_blocks(allocator) == 0
    assert len(allocator.fleet.may_let_go("d0")) == 4, "an explanation lets none go"
