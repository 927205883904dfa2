"""The stored responses, bounded in bytes and in time. Plain Python and in memory: a restart forgets them.

What is over leaves after `ttl_s`, or earlier for want of room: the oldest of the owner with the most bytes goes first,
so that one client does not push out what others have stored. What still runs does not leave for want of room. It counts
as failed when its ingress has not renewed its lease.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never, cast

from deployments.stored.calls import (
    RUNNING,
    A,
    Answer,
    AnyCall,
    Begin,
    Call,
    Cancel,
    Delete,
    Events,
    EventsSoFar,
    Get,
    News,
    Put,
    Report,
    Stored,
    Verdict,
)

LEASE_S = 10.0
"""Seconds without a report until a background response counts as failed."""
ENTRY_BYTES = 1024
"""What an entry takes beside its content, about."""
LOST = "the ingress that ran this response is gone"
NO_ROOM = "the store of responses has no room for the answer"


@dataclass
class _Entry:
    """One response. `until_s`: the end of its lease while it runs, else of its time. `events`: None: not kept.

    `deleted`: it is shown no more, and waits for its ingress to end it.
    """

    stored: Stored
    until_s: float
    events: list[bytes] | None = None
    event_bytes: int = 0
    deleted: bool = False

    @property
    def runs(self) -> bool:
        return self.stored.status in RUNNING

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES + len(self.stored.response) + len(self.stored.items) + self.event_bytes


class ResponseStore:
    """Answers the calls of `deployments.stored.calls`, where each says what it does. `clock`: seconds, monotonic."""

    def __init__(
        self, max_bytes: int, ttl_s: float, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._ttl_s, self._lease_s, self._clock = max_bytes, ttl_s, lease_s, clock
        self._running: dict[str, _Entry] = {}
        self._over: dict[str, _Entry] = {}  # in the order in which they ended
        self._over_of: dict[str, dict[str, None]] = {}  # their ids by owner, in the same order
        self._bytes_of: Counter[str] = Counter()
        self._bytes = 0

    async def ask(self, call: Call[A]) -> A:
        """The answer to a call."""
        self.sweep()
        # mypy cannot see that each case gives its own call's answer.
        return cast(A, self._answer(cast(AnyCall, call)))

    def _answer(self, call: AnyCall) -> Answer:
        match call:
            case Begin():
                return self._begin(call)
            case Report(news):
                return {response_id: self._report(response_id, each) for response_id, each in news.items()}
            case Put():
                return self._put(call)
            case Get(response_id, owner):
                found = self._find(response_id, owner)
                return None if found is None else found.stored
            case Cancel(response_id, owner):
                return self._cancel(response_id, owner)
            case Delete(response_id, owner):
                return self._delete(response_id, owner)
            case Events(response_id, owner, first):
                return self._events(response_id, owner, first)
            case _:
                assert_never(call)

    def sweep(self) -> None:
        """Forget what has had its time, and fail what has lost its ingress."""
        now_s = self._clock()
        for response_id, entry in [(i, e) for i, e in self._running.items() if e.until_s <= now_s]:
            if entry.deleted:
                self._remove(response_id)
            else:
                self._end(response_id, replace(entry.stored, status="failed", reason=LOST))
        while self._over and next(iter(self._over.values())).until_s <= now_s:
            self._remove(next(iter(self._over)))

    @property
    def held(self) -> tuple[int, int]:
        """Responses and bytes."""
        return len(self._running) + len(self._over), self._bytes

    # ---- one method a call

    def _begin(self, call: Begin) -> bool:
        if call.response_id in self._running or call.response_id in self._over:
            return True
        entry = _Entry(call.stored, self._clock() + self._lease_s, [] if call.keeps_events else None)
        if not self._make_room(entry.bytes):
            return False
        self._running[call.response_id] = entry
        self._count(entry, entry.bytes)
        return True

    def _report(self, response_id: str, news: News) -> Verdict:
        entry = self._running.get(response_id)
        if entry is None:
            return Verdict.OVER if response_id in self._over else Verdict.UNKNOWN
        if entry.deleted:
            self._remove(response_id)
            return Verdict.OVER
        entry.until_s = self._clock() + self._lease_s
        entry.stored = replace(entry.stored, status=news.status)
        self._append(entry, news)
        return Verdict.RUNS

    def _put(self, call: Put) -> bool:
        entry = self._running.get(call.response_id)
        if entry is None:
            if call.response_id in self._over:
                return False
            if not self._begin(Begin(call.response_id, call.stored, call.last is not None and call.last.first == 0)):
                return False
            entry = self._running[call.response_id]
        elif entry.stored.owner != call.stored.owner:
            return False
        elif entry.deleted:
            self._remove(call.response_id)
            return False
        if call.last is not None:
            self._append(entry, call.last)
        return self._end(call.response_id, call.stored)

    def _cancel(self, response_id: str, owner: str) -> Stored | None:
        entry = self._find(response_id, owner)
        if entry is None:
            return None
        if entry.runs:
            self._end(response_id, replace(entry.stored, status="cancelled"))
        return entry.stored

    def _delete(self, response_id: str, owner: str) -> bool:
        entry = self._find(response_id, owner)
        if entry is None:
            return False
        if entry.runs:
            entry.deleted = True
        else:
            self._remove(response_id)
        return True

    def _events(self, response_id: str, owner: str, first: int) -> EventsSoFar | None:
        entry = self._find(response_id, owner)
        if entry is None:
            return None
        return EventsSoFar(None if entry.events is None else tuple(entry.events[first:]), entry.stored)

    # ---- the entries and their bytes

    def _find(self, response_id: str, owner: str) -> _Entry | None:
        entry = self._running.get(response_id) or self._over.get(response_id)
        return entry if entry is not None and entry.stored.owner == owner and not entry.deleted else None

    def _append(self, entry: _Entry, news: News) -> None:
        """Keep new events; where there is no room for them, keep none of this response any more."""
        if entry.events is None:
            return
        new = news.events[max(0, len(entry.events) - news.first) :]
        size = sum(map(len, new))
        if self._make_room(size):
            entry.events += new
        else:
            entry.events, size = None, -entry.event_bytes
        entry.event_bytes += size
        self._count(entry, size)

    def _end(self, response_id: str, stored: Stored) -> bool:
        """What ran is over. False where there is no room for its answer: then it has failed."""
        entry = self._running[response_id]
        before = entry.bytes
        size = len(stored.response) + len(stored.items) - len(entry.stored.response) - len(entry.stored.items)
        fits = self._make_room(size)
        entry.stored = stored if fits else replace(entry.stored, status="failed", reason=NO_ROOM)
        self._count(entry, entry.bytes - before)
        entry.until_s = self._clock() + self._ttl_s
        self._over[response_id] = self._running.pop(response_id)
        self._over_of.setdefault(stored.owner, {})[response_id] = None
        return fits

    def _make_room(self, size: int) -> bool:
        """Let the oldest leave until there is room. False where that is not enough."""
        if size > self._max_bytes:
            return False
        while self._bytes + size > self._max_bytes and self._over:
            largest = max(self._over_of, key=self._bytes_of.__getitem__)
            self._remove(next(iter(self._over_of[largest])))
        return self._bytes + size <= self._max_bytes

    def _remove(self, response_id: str) -> None:
        entry = self._running.pop(response_id, None)
        if entry is None:
            entry = self._over.pop(response_id)
            of_owner = self._over_of[entry.stored.owner]
            del of_owner[response_id]
            if not of_owner:
                del self._over_of[entry.stored.owner]
        self._count(entry, -entry.bytes)

    def _count(self, entry: _Entry, size: int) -> None:
        owner = entry.stored.owner
        self._bytes += size
        self._bytes_of[owner] += size
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]
