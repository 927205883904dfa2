"""The waiting room: bounded, by class and fairly among clients, no one starves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView, View
from deployments.messages import Admit, Decision, Mode, Placement, Queue, Reject, ReplicaInfo, Role, SessionRequest
from deployments.policy.admission.class_queue import Called, Entered
from deployments.policy.admission.classes import PriorityClass, PriorityClasses
from deployments.policy.admission.waiting_room import LET_GO_WAITS, OVERTAKING_DEPTH, TURNS_BY_RANK, WaitingRoom


def decode(replica_id: str, total: int, free: int) -> ReplicaView:
    info = ReplicaInfo(replica_id, "decode", Role.DECODE, "node", "engine", 1, total, 99, 10_000)
    return ReplicaView(info, free, 0, 0)


def fleet_of(*ready: ReplicaView) -> FleetView:
    return FleetView(ready, tuple(view.info for view in ready))


def place(request: SessionRequest, view: View) -> Decision:
    """The first replica that holds the tokens; a block is one."""
    assert isinstance(view, FleetView)
    tokens = request.prompt_tokens + request.max_tokens
    if all(tokens > info.total_blocks for info in view.known):
        return Reject("it fits nowhere")
    for replica in view.ready:
        if tokens <= replica.free_blocks:
            placement = Placement(request.session_id, 1, Mode.DECODE_LOCAL, "", replica.info, None, tokens, 60.0, 600.0)
            return Admit(placement)
    return Queue("no blocks")


def ask(session_id: str, tokens: int) -> SessionRequest:
    return SessionRequest(session_id, tokens - 1, 1, (Mode.DECODE_LOCAL,))


def room_of(*requests: SessionRequest, max_requests: int = 100, classes: PriorityClasses | None = None) -> WaitingRoom:
    room = WaitingRoom(max_requests, timeout_s=30.0, max_retry_after_s=20.0, classes=classes)
    for request in requests:
        assert room.enter(request, 0.0) == Entered()
    return room


def called(room: WaitingRoom, view: FleetView, now_s: float) -> tuple[str, Decision] | None:
    found = room.next_ready(view, place, now_s)
    return (found.request.session_id, found.decision) if found else None


def test_the_room_is_bounded_and_says_when_to_come_back() -> None:
    room = room_of(ask("a", 10), ask("b", 10), max_requests=2)
    for now_s, retry_after_s in ((0.0, 1.0), (12.0, 12.0), (29.0, 20.0)):
        refused = Reject("2 requests are waiting already", retry_after_s, code="queue_full")
        assert room.enter(ask("c", 10), now_s) == refused
    assert "c" not in room


def of_client(session_id: str, client: str) -> SessionRequest:
    return replace(ask(session_id, 10), client=client)


def test_in_a_full_room_no_client_keeps_the_others_out() -> None:
    room = room_of(*(of_client(f"a{n}", "a") for n in range(3)), of_client("b0", "b"), max_requests=4)
    entered = room.enter(of_client("c0", "c"), 1.0)
    assert isinstance(entered, Entered)
    assert entered.displaced is not None
    assert entered.displaced.request.session_id == "a2", "the newest of the client that has the most"
    assert entered.displaced.decision == Reject(
        "the queue is full, and its client has 3 requests in it", 1.0, code="displaced"
    )
    for again in (of_client("a3", "a"), of_client("c1", "c"), of_client("b1", "b")):
        refused = room.enter(again, 1.0)
        assert isinstance(refused, Reject)
        assert refused.code == "queue_full", "its client has as many as any other, or one fewer"


def test_in_a_full_class_no_client_keeps_the_others_out() -> None:
    classes = PriorityClasses((PriorityClass("batch", 5, max_queued=2),), "batch")
    room = room_of(max_requests=100, classes=classes)
    for n in range(2):
        assert room.enter(replace(of_client(f"a{n}", "a"), priority="batch"), 0.0) == Entered()
    entered = room.enter(replace(of_client("b0", "b"), priority="batch"), 0.0)
    assert isinstance(entered, Entered)
    assert entered.displaced is not None
    assert entered.displaced.request.session_id == "a1"


def test_what_was_placed_before_is_not_displaced() -> None:
    room = room_of(*(replace(of_client(f"a{n}", "a"), attempt=2) for n in range(3)), max_requests=3)
    refused = room.enter(of_client("b0", "b"), 0.0)
    assert isinstance(refused, Reject)
    assert refused.code == "queue_full"


def test_entering_twice_raises_and_leaving_is_idempotent() -> None:
    room = room_of(ask("a", 10))
    with pytest.raises(ValueError, match="session a is waiting already"):
        room.enter(ask("a", 10), 1.0)
    assert room.remove("a")
    assert not room.remove("a")
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


def test_after_half_its_timeout_none_overtakes_a_request_where_it_could_go() -> None:
    room = room_of(ask("large", 80), ask("small", 10))
    assert called(room, fleet_of(decode("d0", 100, 50)), 15.1) is None
    found = called(room, fleet_of(decode("d0", 100, 80)), 15.2)
    assert found is not None
    assert found[0] == "large"


def test_a_patient_request_holds_up_others_on_one_replica_only() -> None:
    room = room_of(ask("large", 80), ask("small", 10))
    found = called(room, fleet_of(decode("d0", 100, 40), decode("d1", 100, 50), decode("d2", 100, 30)), 20.0)
    assert found is not None
    assert isinstance(found[1], Admit)
    assert (found[0], found[1].placement.owner.replica_id) == ("small", "d0")


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
    assert (room.deadline_s("b"), room.next_deadline_s()) == (40.0, 30.0)
    assert room.expired(29.9) == ()
    assert [request.session_id for request in room.expired(30.0)] == ["a"]
    assert room.expired(30.0) == ()
    assert (len(room), room.next_deadline_s()) == (1, 40.0)


def test_none_has_waited_too_long_while_a_first_replica_starts() -> None:
    room = room_of(ask("a", 10))
    room.keep_until_s = 90.0
    assert (room.deadline_s("a"), room.next_deadline_s()) == (90.0, 90.0)
    assert room.expired(89.9) == ()
    room.enter(ask("b", 10), 80.0)
    assert [request.session_id for request in room.expired(90.0)] == ["a"]
    assert room.deadline_s("b") == 110.0, "a later request has its own time"


# ---- classes

CHAT = PriorityClass("chat", rank=0, ttft_s=4.0)
BATCH = PriorityClass("batch", rank=1)
IDLE = PriorityClass("idle", rank=2, max_queued=2)
CLASSES = PriorityClasses([BATCH, CHAT, IDLE], default="batch")


def of_class(name: str, session_id: str, tokens: int = 10, client: str = "") -> SessionRequest:
    return SessionRequest(session_id, tokens - 1, 1, (Mode.DECODE_LOCAL,), priority=name, client=client)


def everything(request: SessionRequest, view: View) -> Decision:
    """Capacity for every request, on an empty replica."""
    return place(request, fleet_of(decode("d0", 1000, 1000)))


def served(room: WaitingRoom, count: int | None = None) -> list[SessionRequest]:
    """The requests that leave the room, in order, while there is capacity for one after another."""
    found: list[SessionRequest] = []
    while len(found) != count and (called := room.next_ready(FleetView(), everything, 1.0)):
        assert isinstance(called.decision, Admit)
        found.append(called.request)
    return found


def test_a_lower_rank_goes_first_and_the_others_get_every_fourth_turn() -> None:
    room = room_of(*(of_class(name, f"{name}-{n}") for n in range(6) for name in ("batch", "chat")), classes=CLASSES)
    assert room.queued() == {"batch": 6, "chat": 6, "idle": 0}
    names = [request.priority for request in served(room)]
    assert names == [*["chat"] * 3, "batch", *["chat"] * 3, *["batch"] * 5]


def test_classes_of_one_rank_share_by_weight() -> None:
    classes = PriorityClasses([PriorityClass("a", weight=3.0), PriorityClass("b", weight=1.0)], default="a")
    room = room_of(*(of_class(name, f"{name}-{n}") for n in range(40) for name in ("a", "b")), classes=classes)
    names = [request.priority for request in served(room, 40)]
    assert names.count("a") == 30


QUICK, PATIENT, IDLER = PriorityClass("quick", ttft_s=2.0), PriorityClass("patient", ttft_s=9.0), PriorityClass("idler")
EQUALS = PriorityClasses([PATIENT, QUICK, IDLER], default="idler")


def test_among_classes_of_one_rank_the_earliest_target_goes_first() -> None:
    room = room_of(of_class("idler", "i0"), of_class("patient", "p0"), of_class("patient", "p1"), classes=EQUALS)
    for n, at_s in enumerate((1.0, 6.5, 7.5)):  # due at 3.0, 8.5 and 9.5, p0 and p1 at 9.0
        room.enter(of_class("quick", f"q{n}"), at_s)
    room.remove("q0")
    found = [room.next_ready(FleetView(), everything, 8.0) for _ in range(3)]
    assert [each.request.session_id for each in found if each] == ["q1", "p0", "p1"]
    assert [request.session_id for request in served(room)] == ["i0", "q2"], "a turn of the one that is due"


def test_one_whose_target_has_passed_gives_way_to_those_who_can_still_be_in_time() -> None:
    room = room_of(of_class("quick", "late"), classes=EQUALS)
    room.enter(of_class("patient", "in-time"), 1.0)
    found = [room.next_ready(FleetView(), everything, 2.0) for _ in range(2)]
    assert [each.request.session_id for each in found if each] == ["in-time", "late"]


def test_a_class_that_was_away_has_saved_up_nothing() -> None:
    room = room_of(*(of_class("chat", f"c{n}") for n in range(60)), classes=CLASSES)
    served(room, 20)
    for n in range(20):
        room.enter(of_class("batch", f"b{n}"), 1.0)
    names = [request.priority for request in served(room, 20)]
    assert names.count("batch") == 5


def test_the_one_that_is_due_waits_for_its_turn_and_keeps_what_it_claims() -> None:
    room = room_of(of_class("batch", "large", 80), *(of_class("chat", f"c{n}") for n in range(20)), classes=CLASSES)
    for n in range(TURNS_BY_RANK):
        found = called(room, fleet_of(decode("d0", 100, 50)), float(n))
        assert found is not None
        assert found[0] == f"c{n}"
    # Due, and patient: it claims d0, however often others are served elsewhere.
    for n in range(8):
        view = fleet_of(decode("d0", 100, 50 + n), decode("d1", 20, 10))
        found = called(room, view, 15.1)
        assert found is not None
        assert isinstance(found[1], Admit)
        assert found[1].placement.owner.replica_id == "d1"
    assert called(room, fleet_of(decode("d0", 100, 79)), 15.1) is None
    found = called(room, fleet_of(decode("d0", 100, 80)), 15.1)
    assert found is not None
    assert found[0] == "large"


def test_a_class_with_an_objective_is_patient_after_half_of_it() -> None:
    room = room_of(of_class("chat", "large", 80), of_class("chat", "small"), classes=CLASSES)
    assert called(room, fleet_of(decode("d0", 100, 50)), 2.1) is None
    found = called(room, fleet_of(decode("d0", 100, 50)), 2.0)
    assert found is not None
    assert found[0] == "small"


def test_many_who_cannot_be_placed_do_not_hide_another_class() -> None:
    room = room_of(*(of_class("chat", f"c{n}", 80) for n in range(70)), of_class("idle", "small"), classes=CLASSES)
    found = called(room, fleet_of(decode("d0", 100, 50)), 1.0)
    assert found is not None
    assert found[0] == "small"


def test_a_refused_one_takes_no_turn() -> None:
    huge = [of_class("chat", f"huge-{n}", 800) for n in range(9)]
    room = room_of(*huge, of_class("batch", "b"), of_class("chat", "c", 20), classes=CLASSES)
    view = fleet_of(decode("d0", 100, 90))
    answers = [called(room, view, 1.0) for _ in range(11)]
    assert [answer[0] for answer in answers if answer] == [*(f"huge-{n}" for n in range(9)), "c", "b"]


def test_a_class_may_have_its_own_bound() -> None:
    room = room_of(of_class("idle", "a"), of_class("idle", "b"), classes=CLASSES)
    refused = room.enter(of_class("idle", "c"), 0.0)
    assert refused == Reject("2 requests of class idle are waiting already", 1.0, code="queue_full")
    assert room.enter(of_class("batch", "c"), 0.0) == Entered()


def test_in_a_full_room_the_newest_of_the_last_class_gives_way() -> None:
    room = room_of(
        *(of_class("idle", name) for name in ("i0", "i1")), of_class("batch", "b0"), max_requests=3, classes=CLASSES
    )
    entered = room.enter(of_class("chat", "c0"), 3.0)
    refusal = Reject("the queue is full, and class chat goes before class idle", 3.0, code="displaced")
    assert entered == Entered(Called(of_class("idle", "i1"), refusal))
    assert ("i1" in room, len(room)) == (False, 3)
    refused = room.enter(of_class("idle", "i2"), 3.0)
    assert isinstance(refused, Reject)
    assert refused.code == "queue_full"
    entered = room.enter(of_class("batch", "b1"), 3.0)
    assert isinstance(entered, Entered)
    assert entered.displaced is not None
    assert entered.displaced.request.session_id == "i0"
    assert isinstance(room.enter(of_class("batch", "b2"), 3.0), Reject)
    assert [request.session_id for request in served(room)] == ["c0", "b0", "b1"]


def test_the_one_that_is_due_does_not_give_way() -> None:
    chats = [of_class("chat", f"c{n}") for n in range(4)]
    room = room_of(*chats, of_class("batch", "b"), max_requests=5, classes=CLASSES)
    served(room, TURNS_BY_RANK)
    assert room.next_ready(FleetView(), lambda request, view: Queue("full"), 1.0) is None
    for n in range(3):
        assert room.enter(of_class("chat", f"later-{n}"), 1.0) == Entered()
    assert isinstance(room.enter(of_class("chat", "last"), 1.0), Reject)
    assert [request.session_id for request in served(room, 1)] == ["b"]


# ---- clients


def test_clients_take_turns_by_tokens() -> None:
    hungry = [of_class("", f"h{n}", 30, "hungry") for n in range(4)]
    modest = [of_class("", f"m{n}", 10, "modest") for n in range(4)]
    room = room_of(*hungry, *modest)
    assert [request.session_id for request in served(room)] == ["m0", "m1", "h0", "m2", "m3", "h1", "h2", "h3"]


def test_the_expected_answer_counts_not_the_longest() -> None:
    room = room_of()
    for client, expected in (("wordy", 500.0), ("brief", 5.0)):
        for n in range(2):
            room.enter(SessionRequest(f"{client}-{n}", 10, 1000, client=client), 0.0, expected)
    order = [room.next_ready(FleetView(), lambda request, view: Reject("no"), 0.0) for _ in range(4)]
    assert [called.request.client for called in order if called] == ["brief", "brief", "wordy", "wordy"]


def test_a_client_that_was_away_has_saved_up_nothing() -> None:
    room = room_of(*(of_class("", f"h{n}", 10, "here") for n in range(20)))
    served(room, 10)
    for n in range(10):
        room.enter(of_class("", f"r{n}", 10, "returned"), 1.0)
    assert [request.client for request in served(room, 10)].count("returned") == 5


def test_those_who_give_up_leave_no_debt() -> None:
    room = room_of(*(of_class("", f"a{n}", 10, "a") for n in range(9)))
    for n in range(8):
        room.remove(f"a{n}")
    room.enter(of_class("", "b0", 11, "b"), 0.0)
    assert [request.session_id for request in served(room)] == ["a8", "b0"]


def test_how_many_are_ahead() -> None:
    room = room_of(*(of_class("chat", f"c{n}") for n in range(5)), classes=CLASSES)
    for client, count in (("heavy", 9), ("light", 1)):
        for n in range(count):
            room.enter(of_class("batch", f"{client}-{n}", client=client), 0.0)
    assert room.ahead_of(of_class("chat", "x"), 0.0) == 5
    assert room.ahead_of(of_class("batch", "x", client="heavy"), 0.0) == 5 + 10
    assert room.ahead_of(of_class("batch", "x", client="light"), 0.0) == 5 + 1 + 2
    assert room.ahead_of(of_class("batch", "x", client="new"), 0.0) == 5 + 2
    assert room.ahead_of(of_class("idle", "x"), 0.0) == 15


def test_of_another_class_of_its_rank_only_those_who_are_due_before_it_are_ahead() -> None:
    room = room_of(of_class("patient", "p0"), of_class("idler", "i0"), classes=EQUALS)
    room.enter(of_class("patient", "p1"), 3.0)
    room.enter(of_class("quick", "q0"), 3.0)
    assert room.ahead_of(of_class("quick", "x"), 3.0) == 1
    assert room.ahead_of(of_class("quick", "x"), 8.0) == 2, "q0 is late, and p0 is due"
    assert room.ahead_of(of_class("patient", "x"), 3.0) == 3
    assert room.ahead_of(of_class("idler", "x"), 3.0) == 4


def again(session_id: str, tokens: int, priority: str = "") -> SessionRequest:
    return replace(ask(session_id, tokens), attempt=2, priority=priority)


def test_what_is_placed_again_goes_before_whoever_waits() -> None:
    classes = PriorityClasses([PriorityClass("chat", ttft_s=0.5), PriorityClass("batch", rank=1)], "batch")
    room = room_of(replace(ask("first", 5), priority="chat"), ask("due", 5), classes=classes)
    for number in range(2):
        assert room.enter(again(f"again-{number}", 5, "batch"), 1.0) == Entered()
    one = fleet_of(decode("d", 5, 5))
    order = [called(room, one, 1.0) for _ in range(4)]
    assert [name for name, _ in filter(None, order)] == ["again-0", "again-1", "first", "due"]
    assert len(room) == 0


def test_one_placed_again_that_has_no_room_does_not_hold_up_those_behind_it() -> None:
    room = room_of(ask("small", 5))
    assert room.enter(again("large", 50), 0.0) == Entered()
    found = called(room, fleet_of(decode("d", 100, 10)), 0.0)
    assert found is not None
    assert found[0] == "small"


def test_the_room_is_never_full_for_what_is_placed_again_nor_does_it_leave_for_others() -> None:
    classes = PriorityClasses(
        [PriorityClass("chat", max_queued=1), PriorityClass("batch", rank=1, max_queued=1)], "batch"
    )
    room = room_of(ask("a", 5), max_requests=1, classes=classes)
    assert room.enter(again("b", 5), 0.0) == Entered()
    assert room.remove("a")
    refused = room.enter(replace(ask("c", 5), priority="chat"), 0.0)
    assert isinstance(refused, Reject)
    assert refused.code == "queue_full"
    assert "b" in room
    assert room.remove("b")
    assert room.enter(ask("d", 5), 0.0) == Entered()


YIELDING = PriorityClasses((PriorityClass("chat"), PriorityClass("night", 1, weight=50.0, yields=True)), "chat")


def later(session_id: str) -> SessionRequest:
    return replace(ask(session_id, 10), priority="night")


def test_what_yields_is_tried_only_while_no_other_waits() -> None:
    room = room_of(later("n0"), later("n1"), ask("large", 80), classes=YIELDING)
    assert called(room, fleet_of(decode("d0", 100, 50)), 1.0) is None
    assert called(room, fleet_of(decode("d0", 100, 50)), 20.0) is None, "nor for having waited for long"
    found = called(room, fleet_of(decode("d0", 100, 80)), 20.0)
    assert found is not None
    assert found[0] == "large"
    assert [called(room, fleet_of(decode("d0", 100, 50)), 21.0) is not None for _ in "ab"] == [True, True]


def test_what_was_let_go_is_first_of_those_that_yield_and_waits_for_longer() -> None:
    room = room_of(later("n0"), classes=YIELDING)
    assert room.enter(again("gone", 10, "night"), 0.0) == Entered()
    assert room.enter(ask("large", 80), 1.0) == Entered()
    assert called(room, fleet_of(decode("d0", 100, 50)), 1.0) is None, "not before others"
    assert room.next_deadline_s() == 30.0
    assert [request.session_id for request in room.expired(31.0)] == ["n0", "large"]
    assert room.next_deadline_s() == room.deadline_s("gone") == LET_GO_WAITS * 30.0
    assert room.enter(later("n1"), 290.0) == Entered()
    assert room.expired(299.0) == ()
    found = [called(room, fleet_of(decode("d0", 100, 10)), 299.0) for _ in "ab"]
    assert [each[0] for each in found if each] == ["gone", "n1"]
    assert room.enter(again("late", 10, "night"), 300.0) == Entered()
    assert [request.session_id for request in room.expired(600.0)] == ["late"]
    assert (len(room), room.next_deadline_s()) == (0, None)


def test_what_yields_has_no_share_of_the_turns() -> None:
    room = room_of(later("n"), *(ask(f"c{number}", 10) for number in range(2 * TURNS_BY_RANK)), classes=YIELDING)
    order = [called(room, fleet_of(decode("d0", 100, 10)), 1.0) for _ in range(2 * TURNS_BY_RANK + 1)]
    assert [each[0] for each in order if each] == [*(f"c{number}" for number in range(2 * TURNS_BY_RANK)), "n"]


def test_what_yields_holds_no_other_up() -> None:
    room = room_of(later("n"), classes=YIELDING)
    assert (len(room), room.pressing) == (1, 0)
    assert not room.holds_up(ask("c", 10))
    assert room.holds_up(later("m"))
    room.enter(ask("c", 10), 0.0)
    assert room.pressing == 1
    assert room.holds_up(ask("d", 10))
