"""Reports from a channel's thread to the engine's thread: the handoffs that have ended, and counters."""

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
    "bytes_overlapped",  # of these, before their prompt's prefill was over
    "write_s",
    "handoffs_landed",
    "handoffs_failed",
    "handoffs_received",
    "handoffs_broken",
    "fetches_landed",  # for another replica
    "fetches_failed",  # for another replica
    "blocks_fetched",  # from other replicas
    "fetch_s",  # in which those came
    "fetches_broken",  # from other replicas: less than what was asked for has come
    "fetches_corrupt",  # of these, those with a block that is not as its source read it
    "fetch_digest_s",  # in which digests of fetched blocks were computed, here as source and as target
    "messages_refused",  # well formed, but not allowed from this sender, or not on this side
)


@dataclass(slots=True)
class Results:
    """The handoffs that have ended since the engine last asked, by engine request id.

    `received`: the first token, or None where this rank does not carry it. `broken`: the reason. `released`: the
    prefill requests whose blocks are free. `fetched`: the number of leading blocks that a fetch has brought. `late`:
    the requests whose fetch has not stopped in its time. Their blocks may be written until `fetched` has them, too.
    """

    received: dict[str, int | None] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    fetched: dict[str, int] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)


class Outbox:
    """The channel's thread fills it, and the engine's thread empties it."""

    def __init__(self) -> None:
        self._results, self._lock, self._news = Results(), threading.Lock(), False
        self.on_news: Callable[[], None] = lambda: None
        self.counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def received(self, request_id: str, token: int | None) -> None:
        """A decode request's KV is here. So is its first token, where this rank carries it."""
        self.counts["handoffs_received"] += 1
        with self._lock:
            self._results.received[request_id] = token
        self.alarm()

    def broken(self, request_id: str, reason: str) -> None:
        """A decode request's KV will not come, and no peer writes its blocks any more."""
        self.counts["handoffs_broken"] += 1
        with self._lock:
            self._results.broken[request_id] = reason
        self.alarm()

    def fetched(self, request_id: str, blocks: int, asked: int, seconds: float) -> None:
        """A fetch is over, and no peer writes its blocks any more. The first `blocks` of those asked for are here.

        `seconds`: since it began.
        """
        self.counts["blocks_fetched"] += blocks
        self.counts["fetch_s"] += seconds if blocks else 0.0
        self.counts["fetches_broken"] += blocks < asked
        with self._lock:
            self._results.fetched[request_id] = blocks
        self.alarm()

    def late(self, request_id: str) -> None:
        """A fetch's time is over, and a peer may still write its blocks."""
        with self._lock:
            self._results.late.add(request_id)
        self.alarm()

    def released(self, request_id: str) -> None:
        """No write reads a prefill request's blocks any more."""
        with self._lock:
            self._results.released.add(request_id)
        self.alarm()

    def alarm(self) -> None:
        """Tell the engine's thread that there is news: results to take, or a change to look at."""
        self._news = True
        self.on_news()

    def take(self) -> Results:
        """The handoffs that have ended since the last call."""
        with self._lock:
            taken, self._results = self._results, Results()
            self._news = False
        return taken

    @property
    def has_news(self) -> bool:
        """Whether there is news since the last `take`."""
        return self._news


def remember(book: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry, and keep only the newest `TOMBSTONES`. Late messages are answered from them."""
    book[key] = value
    while len(book) > TOMBSTONES:
        book.popitem(last=False)
