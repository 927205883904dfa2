"""The queue of one class in the waiting room: its clients share the turns fairly. Pure.

Self-clocked fair queueing (Golestani, 1994). The next request of a client is stamped with the tokens that the client
has been served plus those of the request, and the lowest stamp is served first; equal stamps go by target time. A
client that joins starts at the highest stamp ever served, so it gains nothing by having been away. Stamps only grow, so
no request is overtaken for ever. The requests of one client keep the order of their target times.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from deployments.messages import SessionRequest
from deployments.policy.admission.classes import PriorityClass


@dataclass(frozen=True, slots=True)
class Waiter:
    """One waiting request. `number`: of its arrival, from 1. `since_s`: when it arrived.

    `target_s`: when it must be placed for its first token to be in time. `tokens`: what serving it counts for: its
    prompt and its expected answer.
    """

    request: SessionRequest
    priority: PriorityClass
    number: int
    since_s: float
    target_s: float
    tokens: float


@dataclass(slots=True)
class _Client:
    served: float
    waiters: list[Waiter] = field(default_factory=list)


_Entry = tuple[float, float, int, str, int]
"""A request's place: stamp, target time, number, client, and the number of the client's requests before it."""

_END: _Entry = (math.inf, math.inf, 0, "", 0)


class Line:
    """The waiting requests of one class.

    Finding the next one looks only at those before it. Joining and removing use binary search and move part of a list
    of the clients, which takes microseconds for ten thousand.
    """

    def __init__(self, priority: PriorityClass) -> None:
        self.priority = priority
        self._clock = 0.0
        self._clients: dict[str, _Client] = {}
        self._first: list[_Entry] = []
        self._arrivals: dict[int, Waiter] = {}
        self._targets: list[float] = []

    def __len__(self) -> int:
        return len(self._arrivals)

    def join(self, waiter: Waiter) -> None:
        """Enter a request."""
        self._arrivals[waiter.number] = waiter
        insort(self._targets, waiter.target_s)
        name = waiter.request.client
        client = self._clients.setdefault(name, _Client(self._clock))
        self._unlist(name, client)
        insort(client.waiters, waiter, key=_due)
        self._list(name, client)

    def remove(self, waiter: Waiter, served: bool = False) -> None:
        """Take a request out. `served`: its tokens count for its client, so the client's later requests come later."""
        del self._arrivals[waiter.number]
        del self._targets[bisect_left(self._targets, waiter.target_s)]
        name = waiter.request.client
        client = self._clients[name]
        self._unlist(name, client)
        del client.waiters[bisect_left(client.waiters, _due(waiter), key=_due)]
        if served:
            client.served += waiter.tokens
            self._clock = max(self._clock, client.served)
        if client.waiters:
            self._list(name, client)
        else:
            del self._clients[name]

    def in_order(self) -> Iterator[Waiter]:
        """The requests in the order in which they would be served. The queue must not change meanwhile."""
        later: list[_Entry] = []
        for entry in chain(self._first, (_END,)):
            while later and later[0] < entry:
                yield self._advance(heapq.heappop(later), later)
            if entry is not _END:
                yield self._advance(entry, later)

    def ahead_of(self, client: str) -> int:
        """The most requests that would be served before a new one of `client`, if all were of one size."""
        known = self._clients.get(client)
        own = len(known.waiters) if known else 0
        others = len(self._clients) - (known is not None)
        return min(len(self), own + (own + 1) * others)

    def count(self, client: str) -> int:
        """The number of a client's requests."""
        known = self._clients.get(client)
        return len(known.waiters) if known else 0

    def of_greatest_client(self, at_least: int) -> list[Waiter]:
        """The requests of the client that has the most; none where that is fewer than `at_least`."""
        most = max((client.waiters for client in self._clients.values()), key=len, default=[])
        return list(most) if len(most) >= at_least else []

    def due_within(self, from_s: float, until_s: float) -> int:
        """The number of requests whose target is between these times."""
        return bisect_left(self._targets, until_s) - bisect_left(self._targets, from_s)

    def newest(self) -> Iterator[Waiter]:
        """The requests, the newest first."""
        return reversed(self._arrivals.values())

    def _advance(self, entry: _Entry, later: list[_Entry]) -> Waiter:
        """The request of an entry. The entry of its client's next request goes to `later`."""
        stamp, _, _, name, position = entry
        waiters = self._clients[name].waiters
        if position + 1 < len(waiters):
            following = waiters[position + 1]
            heapq.heappush(later, (stamp + following.tokens, *_due(following), name, position + 1))
        return waiters[position]

    def _list(self, name: str, client: _Client) -> None:
        insort(self._first, _entry(name, client))

    def _unlist(self, name: str, client: _Client) -> None:
        if client.waiters:
            del self._first[bisect_left(self._first, _entry(name, client))]


def _due(waiter: Waiter) -> tuple[float, int]:
    return waiter.target_s, waiter.number


def _entry(name: str, client: _Client) -> _Entry:
    head = client.waiters[0]
    return client.served + head.tokens, *_due(head), name, 0
