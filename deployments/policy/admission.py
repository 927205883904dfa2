"""The waiting room: a bounded queue of requests that no replica can take yet. Pure.

First in, first out, except that a request which cannot be placed now does not hold up later ones that can. So
that small requests cannot starve a large one for ever, a request that has waited half its timeout claims the
decode replicas that could hold it: those behind it are placed on the others only, and the claimed ones empty
out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployments.fleet import FleetView
from deployments.messages import Admit, Decision, Queue, Reject, SessionRequest
from deployments.policy.placement import claims

OVERTAKING_DEPTH = 64
"""How far from the head a request may be and still be tried: bounds the work of one pass."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request in the room, and since when."""

    request: SessionRequest
    since_s: float


@dataclass(frozen=True, slots=True)
class Called:
    """The request that leaves the room next, and its answer."""

    request: SessionRequest
    decision: Admit | Reject


class WaitingRoom:
    """At most `max_requests` waiters, each for at most `timeout_s`. Times are seconds of the caller's."""

    def __init__(self, max_requests: int, timeout_s: float, max_retry_after_s: float = 30.0) -> None:
        self._max_requests = max_requests
        self._timeout_s = timeout_s
        self._max_retry_after_s = max_retry_after_s
        self._waiters: dict[str, Waiter] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._waiters

    def enter(self, request: SessionRequest, now_s: float) -> int | Reject:
        """Take a place: its position, from 1; or a rejection that says when to come back.

        Raises ValueError when the session is in the room already.
        """
        if request.session_id in self._waiters:
            raise ValueError(f"session {request.session_id} is waiting already")
        if len(self._waiters) >= self._max_requests:
            return Reject(f"{len(self._waiters)} requests are waiting already", self.retry_after_s(now_s))
        self._waiters[request.session_id] = Waiter(request, now_s)
        return len(self._waiters)

    def leave(self, session_id: str) -> bool:
        """Give up a place; idempotent. True when there was one."""
        return self._waiters.pop(session_id, None) is not None

    def next_ready(
        self, view: FleetView, place: Callable[[SessionRequest, FleetView], Decision], now_s: float
    ) -> Called | None:
        """Take out the first waiter that can be answered now. Call again, with a new view, until None."""
        claimed: frozenset[str] = frozenset()
        for waiter in list(self._waiters.values())[:OVERTAKING_DEPTH]:
            decision = place(waiter.request, view)
            if not isinstance(decision, Queue):
                del self._waiters[waiter.request.session_id]
                return Called(waiter.request, decision)
            if self._is_patient(waiter, now_s):
                claimed |= claims(waiter.request, view)
                view = view.without_room_on(claimed)
        return None

    def expired(self, now_s: float) -> tuple[SessionRequest, ...]:
        """Take out those who waited too long."""
        late = [waiter.request for waiter in self._waiters.values() if now_s >= self._deadline_s(waiter)]
        for request in late:
            del self._waiters[request.session_id]
        return tuple(late)

    def deadline_s(self, session_id: str) -> float:
        """When a waiter will be late. Raises KeyError for one that is not in the room."""
        return self._deadline_s(self._waiters[session_id])

    def retry_after_s(self, now_s: float) -> float:
        """When to come back: after what the first in line has waited, within one second and the bound."""
        oldest = next(iter(self._waiters.values()), None)
        waited = now_s - oldest.since_s if oldest else 0.0
        return min(max(waited, 1.0), self._max_retry_after_s)

    def _deadline_s(self, waiter: Waiter) -> float:
        return waiter.since_s + self._timeout_s

    def _is_patient(self, waiter: Waiter, now_s: float) -> bool:
        return now_s - waiter.since_s > self._timeout_s / 2
