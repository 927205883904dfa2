"""What a worker did for its newest handoffs, and when. An event costs some two microseconds; none is of a token."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transfer.channel.outbox import Trace

KEPT = 512
"""Sessions whose handoffs are kept, the newest."""
LONGEST = 64
"""Chunks of one session that are kept apart; the last one takes in all that follow."""

Span = dict[str, Any]
"""`{"what", "from_s", "to_s", "note"}`: seconds of this process's monotonic clock; `to_s` is None where it goes on."""


@dataclass(slots=True)
class _Chunk:
    """`computed`: the prompt's tokens up to its end. `writes`: those that were posted before the next chunk began."""

    began_s: float
    computed: int
    ended_s: float | None = None
    writes: int = 0
    failed: int = 0
    bytes: int = 0
    first_write_s: float = 0.0
    last_write_s: float = 0.0

    def spans(self) -> list[Span]:
        found = [_span("chunk", self.began_s, self.ended_s, f"up to token {self.computed}")]
        if self.writes:
            failed = f", {self.failed} failed" if self.failed else ""
            note = f"{self.writes} writes, {self.bytes} bytes{failed}"
            found.append(_span("writes", self.first_write_s, self.last_write_s or None, note))
        return found


@dataclass(slots=True)
class _Session:
    """`moments`: what takes no time. `in_flight`: for each write, the chunk after whose beginning it was posted."""

    chunks: list[_Chunk] = field(default_factory=list)
    in_flight: deque[_Chunk] = field(default_factory=deque)
    moments: list[Span] = field(default_factory=list)


def _span(what: str, from_s: float, to_s: float | None, note: str = "") -> Span:
    return {"what": what, "from_s": from_s, "to_s": to_s, "note": note}


class HandoffLog:
    """Takes the events of a channel, and passes them on to `trace`. Any thread may call it."""

    def __init__(self, trace: Trace | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace, self._clock = trace, clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, event: str, session: str, **fields: Any) -> None:
        """An event of a session, as the channel names it."""
        with self._lock:
            self._take(self._of(session), event, fields)
        if self._trace is not None:
            self._trace(event, session=session, **fields)

    def spans(self, session: str) -> list[Span]:
        """What was done for a session, in the order in which it began; empty where nothing is known of it."""
        with self._lock:
            known = self._sessions.get(session)
            if known is None:
                return []
            found = [*known.moments, *(span for chunk in known.chunks for span in chunk.spans())]
        return sorted(found, key=lambda span: float(span["from_s"]))

    def _of(self, session: str) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
            while len(self._sessions) > KEPT:
                self._sessions.popitem(last=False)
        return known

    def _take(self, known: _Session, event: str, fields: dict[str, Any]) -> None:
        now_s = self._clock()
        match event:
            case "layer_write":
                if known.chunks:
                    chunk = known.chunks[-1]
                    chunk.first_write_s = chunk.first_write_s or now_s
                    chunk.writes += 1
                    known.in_flight.append(chunk)
            case "layer_written":
                if known.in_flight:
                    chunk = known.in_flight.popleft()
                    chunk.last_write_s = now_s
                    chunk.bytes += fields["bytes"]
                    chunk.failed += not fields["ok"]
            case "forward_begin":
                self._begin(known, now_s, fields["computed"])
            case "forward_end":
                if known.chunks:
                    known.chunks[-1].ended_s = now_s
            case "offered":
                known.moments.append(_span("offer", now_s, now_s, f"{fields['blocks']} blocks"))
            case "fetch":
                known.moments.append(_span("fetch", now_s, now_s, f"{fields['blocks']} cached blocks are asked for"))
            case "fetched":
                known.moments.append(_span("fetched", now_s, now_s, f"{fields['blocks']} cached blocks are here"))
            case "landed":
                known.moments.append(_span("landed", now_s, now_s, "all KV is written"))
            case "received":
                note = "KV and first token are here" if fields["ok"] else "the handoff came to nothing"
                known.moments.append(_span("received", now_s, now_s, note))

    def _begin(self, known: _Session, now_s: float, computed: int) -> None:
        if len(known.chunks) < LONGEST:
            known.chunks.append(_Chunk(now_s, computed))
        else:
            known.chunks[-1].computed, known.chunks[-1].ended_s = computed, None
