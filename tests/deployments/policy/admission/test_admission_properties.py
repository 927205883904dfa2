"""The waiting room under any mix of requests: which are served, how fairly, and that it stays bounded."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView, View
from deployments.messages import Admit, Decision, Mode, Placement, Queue, Reject, ReplicaInfo, Role, SessionRequest
from deployments.policy.admission.class_queue import Entered
from deployments.policy.admission.classes import PriorityClass, PriorityClasses
from deployments.policy.admission.waiting_room import OVERTAKING_DEPTH, TURNS_BY_RANK, WaitingRoom

EMPTY = FleetView()
D0 = ReplicaInfo("d0", "decode", Role.DECODE, "node", "engine", 1, 100, 999, 10_000)

randoms = st.integers(0, 2**32).map(random.Random)

weights = st.sampled_from([0.5, 1.0, 2.0])
fields = st.tuples(st.integers(0, 3), st.sampled_from([None, 2.0]), st.none(), weights)
mixes = st.lists(fields, min_size=1, max_size=3).map(
    lambda each: PriorityClasses((PriorityClass(f"c{n}", *one) for n, one in enumerate(each)), "c0")
)


def admitted(request: SessionRequest, view: View) -> Decision:
    """Capacity for every request."""
    tokens = request.prompt_tokens + request.max_tokens
    return Admit(Placement(request.session_id, 1, Mode.DECODE_LOCAL, "", D0, None, tokens, 60.0, 600.0))


def full(request: SessionRequest, view: View) -> Decision:
    return Queue("full")


@dataclass
class Arrivals:
    """A source of requests of any class, client and size."""

    rng: random.Random
    names: tuple[str, ...]
    clients: int = 3
    made: int = 0

    def request(self, priority: str | None = None, client: str | None = None) -> SessionRequest:
        self.made += 1
        return SessionRequest(
            f"s{self.made}",
            self.rng.randint(1, 20),
            self.rng.randint(1, 20),
            (Mode.DECODE_LOCAL,),
            priority=self.rng.choice(self.names) if priority is None else priority,
            client=f"client-{self.rng.randrange(self.clients)}" if client is None else client,
        )


@given(classes=mixes, rng=randoms, fresh=st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_whoever_waits_is_served_however_many_come_after(
    classes: PriorityClasses, rng: random.Random, fresh: float
) -> None:
    """Two come for each that goes, of the best class, and in the share `fresh` of a client never seen before.

    A client with several requests in a full room may lose its newest to a newcomer: that one has its answer.
    """
    room = WaitingRoom(60, timeout_s=1e9, classes=classes)
    arrivals = Arrivals(rng, classes.names)
    first = [arrivals.request() for _ in range(10)]
    for request in first:
        room.enter(request, 0.0)
    left = {request.session_id for request in first}
    best = min(classes.names, key=lambda name: classes.resolve(name).rank)
    # Each may wait for the 60 in the room, and for newcomers while its client's tokens exceed theirs, at the pace of
    # its class: its share of the turns that are due.
    shares = [classes.resolve(name).weight for name in classes.names]
    bound = (TURNS_BY_RANK + 1) * (sum(shares) / min(shares) + len(shares)) * (60 + 10 * 40)
    calls = 0
    while left:
        called = room.next_ready(EMPTY, admitted, 1.0)
        assert called is not None
        left.discard(called.request.session_id)
        for _ in range(2):
            client = f"new-{arrivals.made}" if rng.random() < fresh else None
            entered = room.enter(arrivals.request(best, client), 1.0)
            if isinstance(entered, Entered) and entered.displaced is not None:
                left.discard(entered.displaced.request.session_id)
        calls += 1
        assert calls <= bound


@given(rng=randoms, sessions_s=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_a_large_one_of_the_last_class_gets_in_before_it_is_late(rng: random.Random, sessions_s: int) -> None:
    """Small requests of a better class come faster than they leave, and would never let all the blocks be free."""
    classes = PriorityClasses([PriorityClass("chat"), PriorityClass("batch", rank=9, weight=0.01)], "chat")
    room = WaitingRoom(1000, timeout_s=60.0, classes=classes)
    room.enter(SessionRequest("large", 99, 1, (Mode.DECODE_LOCAL,), priority="batch"), 0.0)
    running: list[tuple[int, int]] = []
    for second in range(60):
        running = [(ends, blocks) for ends, blocks in running if ends > second]
        for n in range(30):
            tokens = rng.randint(1, 9)
            room.enter(SessionRequest(f"{second}-{n}", tokens, 1, (Mode.DECODE_LOCAL,), client=f"{n % 3}"), second)
        while called := room.next_ready(view_of(running), where_it_fits, second):
            assert isinstance(called.decision, Admit)
            if called.request.session_id == "large":
                return
            running.append((second + rng.randint(1, sessions_s), called.decision.placement.reserved_blocks))
    raise AssertionError("the large one was never placed")


def view_of(running: list[tuple[int, int]]) -> FleetView:
    free = D0.total_blocks - sum(blocks for _, blocks in running)
    return FleetView((ReplicaView(D0, free, len(running), 0),), (D0,))


def where_it_fits(request: SessionRequest, view: View) -> Decision:
    assert isinstance(view, FleetView)
    fits = request.prompt_tokens + request.max_tokens <= view.ready[0].free_blocks
    return admitted(request, view) if fits else Queue("no blocks")


@given(rng=randoms)
@settings(max_examples=50, deadline=None)
def test_two_clients_that_always_wait_get_alike(rng: random.Random) -> None:
    room = WaitingRoom(100, timeout_s=30.0)
    arrivals = Arrivals(rng, ("",))
    counts: Counter[str] = Counter()
    for client in ("a", "b", "a", "b", "a", "a", "a"):
        room.enter(arrivals.request(client=client), 0.0)
    for _ in range(60):
        called = room.next_ready(EMPTY, admitted, 1.0)
        assert called is not None
        request = called.request
        counts[request.client] += request.prompt_tokens + request.max_tokens
        assert abs(counts["a"] - counts["b"]) <= 40, "the largest request"
        room.enter(arrivals.request(client=request.client), 1.0)


@given(rng=randoms, head_start=st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_a_client_that_joins_gets_no_more_than_the_others_from_then_on(rng: random.Random, head_start: int) -> None:
    room = WaitingRoom(100, timeout_s=30.0)
    arrivals = Arrivals(rng, ("",))
    counts: Counter[str] = Counter()
    for _ in range(3):
        room.enter(arrivals.request(client="old"), 0.0)
    for call in range(head_start + 40):
        if call == head_start:
            counts.clear()
            for _ in range(3):
                room.enter(arrivals.request(client="new"), 1.0)
        called = room.next_ready(EMPTY, admitted, 1.0)
        assert called is not None
        counts[called.request.client] += called.request.prompt_tokens + called.request.max_tokens
        room.enter(arrivals.request(client=called.request.client), 1.0)
    assert abs(counts["old"] - counts["new"]) <= 2 * 40


@given(classes=mixes, rng=randoms)
@settings(max_examples=40, deadline=None)
def test_the_requests_of_a_client_and_class_go_by_their_targets(classes: PriorityClasses, rng: random.Random) -> None:
    room = WaitingRoom(100, timeout_s=30.0, classes=classes)
    arrivals = Arrivals(rng, classes.names)
    requests = [arrivals.request() for _ in range(40)]
    for n, request in enumerate(requests):
        room.enter(request, n / 10)
    served: list[SessionRequest] = []
    while called := room.next_ready(EMPTY, admitted, 5.0):
        served.append(called.request)
    assert len(served) == len(requests)
    for key in {(request.priority, request.client) for request in requests}:
        came = [request for request in requests if (request.priority, request.client) == key]
        assert [request for request in served if (request.priority, request.client) == key] == came


@given(targets=st.lists(st.integers(50, 80), min_size=2, max_size=4), rng=randoms)
@settings(max_examples=60, deadline=None)
def test_of_four_places_of_one_rank_three_go_to_the_earliest_targets(targets: list[int], rng: random.Random) -> None:
    classes = PriorityClasses((PriorityClass(f"c{n}", ttft_s=ttft_s) for n, ttft_s in enumerate(targets)), "c0")
    room = WaitingRoom(200, timeout_s=100.0, classes=classes)
    arrivals = Arrivals(rng, classes.names, clients=1)
    target_s: dict[str, float] = {}
    by_turn: list[bool] = []
    for second in range(40):
        for _ in range(rng.randint(0, 3)):
            request = arrivals.request()
            room.enter(request, second)
            target_s[request.session_id] = second + float(classes.resolve(request.priority).ttft_s or 0)
        called = room.next_ready(EMPTY, admitted, second)
        if called is not None:
            by_turn.append(target_s.pop(called.request.session_id) > min(target_s.values(), default=math.inf))
    assert all(sum(by_turn[n : n + TURNS_BY_RANK + 1]) <= 1 for n in range(len(by_turn)))


@given(classes=mixes, rng=randoms, size=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_everyone_who_entered_leaves_once_and_the_room_stays_bounded(
    classes: PriorityClasses, rng: random.Random, size: int
) -> None:
    room = WaitingRoom(size, timeout_s=10.0, classes=classes)
    arrivals = Arrivals(rng, classes.names)
    inside: dict[str, float] = {}
    requests: dict[str, SessionRequest] = {}
    now_s = 0.0
    for _ in range(120):
        now_s += rng.choice([0.0, 0.1, 1.0])
        match rng.randrange(6):
            case 0 | 1 | 2:
                request = arrivals.request()
                requests[request.session_id] = request
                before = Counter((requests[each].priority, requests[each].client) for each in inside)
                entered = room.enter(request, now_s)
                if isinstance(entered, Entered):
                    inside[request.session_id] = now_s
                    if entered.displaced is not None:
                        gone = entered.displaced.request
                        del inside[gone.session_id]
                        ranks = [classes.resolve(each.priority).rank for each in (request, gone)]
                        mine, its = (before[each.priority, each.client] for each in (request, gone))
                        assert ranks[0] < ranks[1] or (request.priority == gone.priority and its >= mine + 2)
                else:
                    assert len(room) == size
            case 3:
                called = room.next_ready(EMPTY, rng.choice([admitted, full, refused]), now_s)
                if called is not None:
                    del inside[called.request.session_id]
            case 4:
                late = {request.session_id for request in room.expired(now_s)}
                assert late == {session for session, since_s in inside.items() if now_s >= since_s + 10.0}
                inside = {session: since_s for session, since_s in inside.items() if session not in late}
            case _:
                session = rng.choice([*inside, "unknown"])
                assert room.remove(session) == (inside.pop(session, None) is not None)
        assert len(room) == len(inside) == sum(room.queued().values()) <= size
        assert all(session in room for session in inside)
        assert room.next_deadline_s() == (min(inside.values()) + 10.0 if inside else None)
    while room.next_ready(EMPTY, admitted, now_s):
        pass
    assert (len(room), sum(room.queued().values())) == (0, 0)


def refused(request: SessionRequest, view: View) -> Decision:
    return Reject("never")


def test_ten_thousand_who_wait_cost_a_pass_no_more_than_a_few() -> None:
    classes = PriorityClasses([PriorityClass("a"), PriorityClass("b", rank=1), PriorityClass("c", rank=2)], "a")
    room = WaitingRoom(10_000, timeout_s=30.0, classes=classes)
    arrivals = Arrivals(random.Random(1), classes.names, clients=3000)
    for _ in range(10_000):
        room.enter(arrivals.request(), 0.0)
    tried: list[str] = []

    def no_room(request: SessionRequest, view: View) -> Decision:
        tried.append(request.session_id)
        return Queue("full")

    assert room.next_ready(EMPTY, no_room, 1.0) is None
    assert OVERTAKING_DEPTH <= len(tried) == len(set(tried)) <= OVERTAKING_DEPTH + len(classes.names)
