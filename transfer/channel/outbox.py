"""What a channel's thread tells the engine's thread: which handoffs have ended, and counters."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int]  # session id, epoch
Trace = Callable[..., None]

TOMBSTONES = 4096
COUNTERS = (
    "writes",
    "blocks_written",
    "bytes_written",
    "write_s",
    "handoffs_landed",
    "handoffs_failed",
    "handoffs_received",
    "handoffs_broken",
    "messages_refused",  # well formed, but not from this sender, or not here
)


@dataclass(slots=True)
class Results:
    """What has ended since the engine last asked, by engine request id."""

    received: dict[str, int | None] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)


class Outbox:
    """Filled by the channel's thread, emptied by the engine's."""

    def __init__(self) -> None:
        self._results, self._lock, self._news = Results(), threading.Lock(), False
        self.on_news: Callable[[], None] = lambda: None
        self.counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def received(self, request_id: str, token: int | None) -> None:
        """A decode request's KV is here, and its first token, where this rank carries it."""
        self.counts["handoffs_received"] += 1
        with self._lock:
            self._results.received[request_id] = token
        self.alarm()

    def broken(self, request_id: str, reason: str) -> None:
        """A decode request's KV will not come, and nobody writes its blocks any more."""
        self.counts["handoffs_broken"] += 1
        with self._lock:
            self._results.broken[request_id] = reason
        self.alarm()

    def released(self, request_id: str) -> None:
        """A prefill request's blocks are not read any more."""
        with self._lock:
            self._results.released.add(request_id)
        self.alarm()

    def alarm(self) -> None:
        """There is something to take, or to look at."""
        self._news = True
        self.on_news()

    def take(self) -> Results:
        """What has ended since the last call."""
        with self._lock:
            taken, self._results = self._results, Results()
            self._news = False
        return taken

    @property
    def has_news(self) -> bool:
        """Something has happened since the last `take`."""
        return self._news


def remember(book: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Keep the newest `TOMBSTONES` entries: late messages are answered from them."""
    book[key] = value
    while len(book) > TOMBSTONES:
        book.popitem(last=False)
