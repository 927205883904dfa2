"""The queue of one class in the waiting room, how it is ordered among the others, and what leaves the room. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from deployments.messages import Admit, Reject, SessionRequest
from deployments.policy.admission.classes import PriorityClass
from deployments.policy.admission.fair_queue import Line, Waiter


@dataclass(frozen=True, slots=True)
class Called:
    """A request that was taken out of the room, and its answer."""

    request: SessionRequest
    decision: Admit | Reject


@dataclass(frozen=True, slots=True)
class Entered:
    """A request has entered. `displaced`: the request that was taken out for it, with its answer."""

    displaced: Called | None = None


class ClassQueue:
    """One class in the room. `turns`: the number of its requests served, divided by its weight."""

    def __init__(self, priority: PriorityClass) -> None:
        self.priority = priority
        self.line = Line(priority)
        self.turns = 0.0

    @property
    def after_next(self) -> float:
        """`turns` after one more request."""
        return self.turns + 1 / self.priority.weight

    def in_order(self, depth: int, now_s: float) -> Iterator[tuple[tuple[int, float], Waiter]]:
        """Its first `depth` requests, each with the key that orders it among the classes of its rank."""
        for waiter in islice(self.line.in_order(), depth):
            is_in_time = self.priority.ttft_s is not None and now_s < waiter.target_s
            yield (0, waiter.target_s) if is_in_time else (1, self.after_next), waiter
