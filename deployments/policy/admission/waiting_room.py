"""The waiting room: a bounded queue of requests that no replica can take yet. Pure.

Classes of a lower rank are served first. Among classes of one rank, the request that must be placed earliest for its
first token to meet its objective is served first, while that can be. Requests that are too late, and classes without an
objective, follow in turns by weight. After three requests served by this order, one is due by share: the first of the
class that is furthest behind its weight's share of all turns. It is tried before all others until it is served, so no
class starves. Within a class the clients share fairly (`fair_queue`).

Sessions that are placed again, some in the middle of their answers, are tried before all of these, and the room is
never full for them: they were admitted once.

Requests of classes that yield are tried only while no other waits. They have no share, and hold nothing up. Of them,
sessions that were let go in the middle of their answers go first. They may wait for longer than others, because what
they have is lost with their place.

A request that cannot be placed now does not hold up later ones that can. After half its allowed wait, a request claims
a decode replica, so smaller requests stop overtaking it: requests behind it are placed on other replicas only, and the
claimed replica empties. It is the one that is nearest to having room. (Claims on all replicas that could hold the
request were tried: under overload one long prompt then held up every short one.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import merge
from itertools import groupby, islice, takewhile
from operator import itemgetter

from deployments.fleet.view import View
from deployments.messages import Admit, Decision, Queue, Reject, SessionRequest
from deployments.policy.admission.class_queue import Called, ClassQueue, Entered
from deployments.policy.admission.classes import PriorityClass, PriorityClasses
from deployments.policy.admission.fair_queue import Waiter
from deployments.policy.placement.field import claimed

OVERTAKING_DEPTH = 64
"""The most requests tried in one pass, divided among the classes that wait. It bounds the work of a pass."""

CLAIMANTS = 8
"""The most requests that claim a replica in one pass. It bounds the cost of claims; the first in order claim."""

LET_GO_WAITS = 10.0
"""How many times as long as others a session waits that was let go."""

TURNS_BY_RANK = 3
"""The number of requests served by rank before one is due by share."""


class WaitingRoom:
    """At most `max_requests` requests wait, each for at most `timeout_s`. Times are seconds of the caller's clock.

    `keep_until_s`: none has waited too long before that.
    """

    def __init__(
        self,
        max_requests: int,
        timeout_s: float,
        max_retry_after_s: float = 30.0,
        classes: PriorityClasses | None = None,
    ) -> None:
        self._max_requests = max_requests
        self._timeout_s = timeout_s
        self._max_retry_after_s = max_retry_after_s
        self._classes = classes or PriorityClasses()
        self._queues = {name: ClassQueue(self._classes.resolve(name)) for name in self._classes.names}
        self.keep_until_s = 0.0
        self._waiters: dict[str, Waiter] = {}  # in order of arrival
        self._again: dict[str, Waiter] = {}  # those of them that are placed again, and do not yield
        self._let_go: dict[str, Waiter] = {}  # those that are placed again, and yield
        self._arrived = 0
        self._turns = 0.0
        self._by_rank = 0
        self._due: Waiter | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    def holds_up(self, request: SessionRequest) -> bool:
        """Whether a new request has to wait because others do. Raises UnknownClass when its class does not exist."""
        return bool(self._waiters if self._classes.resolve(request.priority).yields else self.pressing)

    @property
    def pressing(self) -> int:
        """The number of requests that do not yield."""
        return len(self._waiters) - sum(len(each.line) for each in self._queues.values() if each.priority.yields)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._waiters

    def enter(
        self, request: SessionRequest, now_s: float, output_tokens: float | None = None, takes_s: float = 0.0
    ) -> Entered | Reject:
        """Let a request wait, or refuse it and say when to ask again.

        In a full room a request displaces the newest request of the highest rank, if that rank is higher than its own.
        Otherwise it displaces the newest request of the client that has the most in its class, if its own client has
        fewer by two at least: so no client keeps the others out.
        `output_tokens`: the expected length of the answer; by default its maximum. `takes_s`: the predicted seconds
        from its placement until its first token; its target is so much earlier. Raises ValueError when the session is
        in the room already, UnknownClass when its class does not exist.
        """
        if request.session_id in self._waiters:
            raise ValueError(f"session {request.session_id} is waiting already")
        queue = self._queues[self._classes.resolve(request.priority).name]
        displaced = self._make_room(queue, request.client, now_s) if request.attempt == 1 else None
        if isinstance(displaced, Reject):
            return displaced
        self._seat(request, queue, now_s, request.max_tokens if output_tokens is None else output_tokens, takes_s)
        return Entered(displaced)

    def remove(self, session_id: str) -> bool:
        """Take a request out; idempotent. True when it was waiting."""
        waiter = self._waiters.get(session_id)
        if waiter is not None:
            self._take_out(waiter)
        return waiter is not None

    def next_ready(
        self,
        view: View,
        place: Callable[[SessionRequest, View], Decision],
        now_s: float,
        claim: Callable[[SessionRequest, View], str | None] = claimed,
    ) -> Called | None:
        """Take out the first request that can be answered now. Call it again, with a new view, until it gives None.

        `claim`: the replica that a request claims after half its allowed wait, if any.
        """
        claimants = 0
        for waiter in self._in_order(now_s):
            decision = place(waiter.request, view)
            if not isinstance(decision, Queue):
                self._call(waiter, served=isinstance(decision, Admit))
                return Called(waiter.request, decision)
            if claimants < CLAIMANTS and not decision.for_turn and self._is_patient(waiter, now_s):
                claimants += 1
                replica_id = claim(waiter.request, view)
                view = view if replica_id is None else view.without_room_on((replica_id,))
        return None

    def expired(self, now_s: float) -> tuple[SessionRequest, ...]:
        """Take out the requests that have waited too long."""
        late = tuple(takewhile(lambda waiter: now_s >= self._deadline_s(waiter), self._by_deadline()))
        for waiter in late:
            self._take_out(waiter)
        return tuple(waiter.request for waiter in late)

    def deadline_s(self, session_id: str) -> float:
        """When a request will have waited too long. Raises KeyError for one that is not in the room."""
        return self._deadline_s(self._waiters[session_id])

    def next_deadline_s(self) -> float | None:
        """When the first request will have waited too long; None when no request waits."""
        first = next(self._by_deadline(), None)
        return None if first is None else self._deadline_s(first)

    def _by_deadline(self) -> Iterator[Waiter]:
        others = (waiter for name, waiter in self._waiters.items() if name not in self._let_go)
        return merge(others, self._let_go.values(), key=self._deadline_s)

    def retry_after_s(self, now_s: float) -> float:
        """When a refused request may ask again: after the wait of the oldest request, from 1 s to the bound."""
        oldest = next(self._by_deadline(), None)
        waited = now_s - oldest.since_s if oldest else 0.0
        return min(max(waited, 1.0), self._max_retry_after_s)

    def ahead_of(self, request: SessionRequest, now_s: float) -> int:
        """About how many requests would be served before a new one.

        These are all requests of lower ranks, those of other classes of its rank that are due before it, and those of
        its own class by the fair shares of the clients. Raises UnknownClass when its class does not exist.
        """
        mine = self._classes.resolve(request.priority)
        lines = [queue.line for queue in self._queues.values() if queue.priority.rank == mine.rank]
        before = sum(len(queue.line) for queue in self._queues.values() if queue.priority.rank < mine.rank)
        if mine.ttft_s is None:
            return before + sum(line.ahead_of(request.client) for line in lines)
        target_s = self._target_s(mine, now_s)
        others = (line for line in lines if line.priority is not mine and line.priority.ttft_s is not None)
        own = self._queues[mine.name].line.ahead_of(request.client)
        return before + own + sum(line.due_within(now_s, target_s) for line in others)

    def requests(self) -> Iterator[SessionRequest]:
        """The requests that wait, in the order of their arrival."""
        return (waiter.request for waiter in self._waiters.values())

    def queued(self) -> dict[str, int]:
        """The number of waiting requests, by class."""
        return {name: len(queue.line) for name, queue in self._queues.items()}

    def _make_room(self, queue: ClassQueue, client: str, now_s: float) -> Called | Reject | None:
        """Room for one more request of a class and client: the request displaced for it, if any, or the refusal."""
        limit = queue.priority.max_queued
        if limit is not None and len(queue.line) >= limit:
            full = f"{limit} requests of class {queue.priority.name} are waiting already"
            return self._displace_one_of_many(queue, client, now_s) or self._full(full, now_s)
        if len(self._waiters) < self._max_requests:
            return None
        least = self._least_below(queue.priority)
        if least is not None:
            why = f"class {queue.priority.name} goes before class {least.priority.name}"
            return self._displace(least, why, now_s)
        full = f"{len(self._waiters)} requests are waiting already"
        return self._displace_one_of_many(queue, client, now_s) or self._full(full, now_s)

    def _displace_one_of_many(self, queue: ClassQueue, client: str, now_s: float) -> Called | None:
        waiters = queue.line.of_greatest_client(at_least=queue.line.count(client) + 2)
        newest = max(filter(self._may_be_displaced, waiters), key=lambda waiter: waiter.number, default=None)
        if newest is None:
            return None
        return self._displace(newest, f"its client has {len(waiters)} requests in it", now_s)

    def _seat(
        self, request: SessionRequest, queue: ClassQueue, now_s: float, output_tokens: float, takes_s: float
    ) -> None:
        if not queue.line:
            queue.turns = max(queue.turns, self._turns)
        self._arrived += 1
        target_s = self._target_s(queue.priority, now_s) - takes_s
        tokens = request.prompt_tokens + output_tokens
        waiter = Waiter(request, queue.priority, self._arrived, now_s, target_s, tokens)
        self._waiters[request.session_id] = waiter
        if request.attempt > 1:
            (self._let_go if queue.priority.yields else self._again)[request.session_id] = waiter
        queue.line.join(waiter)

    def _target_s(self, priority: PriorityClass, now_s: float) -> float:
        return now_s + min(priority.ttft_s or self._timeout_s, self._timeout_s)

    def _in_order(self, now_s: float) -> Iterator[Waiter]:
        """The requests to try, in order. None may be entered or taken out meanwhile."""
        yield from islice(self._again.values(), OVERTAKING_DEPTH)
        if not self.pressing:
            yield from islice(self._let_go.values(), OVERTAKING_DEPTH)
        yield from (waiter for waiter in self._in_turn(now_s) if waiter.request.attempt == 1)

    def _in_turn(self, now_s: float) -> Iterator[Waiter]:
        """The requests by the order of their classes."""
        waiting = [queue for queue in self._queues.values() if queue.line]
        waiting = [queue for queue in waiting if not queue.priority.yields] or waiting
        if self._due is None and waiting and self._by_rank >= TURNS_BY_RANK:
            self._due = next(min(waiting, key=lambda queue: queue.after_next).line.in_order())
        if self._due is not None:
            yield self._due
        depth = -(-OVERTAKING_DEPTH // max(len(waiting), 1))
        waiting.sort(key=lambda queue: (queue.priority.rank, queue.after_next))
        for _, equals in groupby(waiting, key=lambda queue: queue.priority.rank):
            lines = [queue.in_order(depth, now_s) for queue in equals]
            yield from (waiter for _, waiter in merge(*lines, key=itemgetter(0)) if waiter is not self._due)

    def _call(self, waiter: Waiter, served: bool) -> None:
        if served:
            queue = self._queues[waiter.priority.name]
            queue.turns = queue.after_next
            self._turns = max(self._turns, queue.turns)
            self._by_rank = 0 if waiter is self._due else self._by_rank + 1
        self._take_out(waiter, served)

    def _take_out(self, waiter: Waiter, served: bool = False) -> None:
        del self._waiters[waiter.request.session_id]
        for again in (self._again, self._let_go):
            again.pop(waiter.request.session_id, None)
        self._queues[waiter.priority.name].line.remove(waiter, served)
        if waiter is self._due:
            self._due = None

    def _least_below(self, priority: PriorityClass) -> Waiter | None:
        """The newest request of the highest rank over that of `priority`, but none that is due or placed again."""
        below = [queue.line for queue in self._queues.values() if queue.priority.rank > priority.rank]
        newest = (next(filter(self._may_be_displaced, line.newest()), None) for line in below)
        waiters = [waiter for waiter in newest if waiter is not None]
        return max(waiters, key=lambda waiter: (waiter.priority.rank, waiter.number), default=None)

    def _may_be_displaced(self, waiter: Waiter) -> bool:
        return waiter is not self._due and waiter.request.attempt == 1

    def _displace(self, waiter: Waiter, why: str, now_s: float) -> Called:
        retry_after_s = self.retry_after_s(now_s)
        self._take_out(waiter)
        return Called(waiter.request, Reject(f"the queue is full, and {why}", retry_after_s, code="displaced"))

    def _full(self, reason: str, now_s: float) -> Reject:
        return Reject(reason, self.retry_after_s(now_s), code="queue_full")

    def _deadline_s(self, waiter: Waiter) -> float:
        times = LET_GO_WAITS if waiter.request.session_id in self._let_go else 1.0
        return max(waiter.since_s + times * self._timeout_s, self.keep_until_s)

    def _is_patient(self, waiter: Waiter, now_s: float) -> bool:
        """Whether half of its allowed wait has passed."""
        return now_s - waiter.since_s > (self._target_s(waiter.priority, waiter.since_s) - waiter.since_s) / 2
