"""Turns the timeline of a handoff into its figures. Pure: events in, numbers out.

An event is one line of a trace: `{"t": seconds, "event": name, ...}`. All processes of a machine use the same clock.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]


class TraceError(Exception):
    """A trace lacks what a handoff must have."""


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer: when it was posted and when it was complete, in seconds, and its size in bytes."""

    posted_s: float
    done_s: float
    size: int


@dataclass(frozen=True, slots=True)
class Handoff:
    """One handoff. Times are in seconds.

    `forward_end_s`: end of the forward pass that computed the last of the prompt. `ready_s`: decode knows that it has
    the KV.
    """

    forward_end_s: float
    ready_s: float
    moves: tuple[Move, ...]

    @property
    def size(self) -> int:
        """Bytes moved."""
        return sum(move.size for move in self.moves)

    @property
    def kv_ready_s(self) -> float:
        """Seconds from the end of the prefill's forward pass until decode had the KV. Below 0: before it."""
        return self.ready_s - self.forward_end_s

    @property
    def kv_written_s(self) -> float:
        """Seconds from the end of the prefill's forward pass until the last transfer was complete."""
        return max(move.done_s for move in self.moves) - self.forward_end_s

    @property
    def overlap_share(self) -> float:
        """Share of the bytes whose transfer was complete when the prefill's forward pass ended."""
        return sum(move.size for move in self.moves if move.done_s <= self.forward_end_s) / self.size

    @property
    def span_s(self) -> float:
        """Seconds from the first transfer posted to the last complete, pauses between them included."""
        return max(move.done_s for move in self.moves) - min(move.posted_s for move in self.moves)

    @property
    def in_flight_s(self) -> float:
        """Seconds in which at least one transfer was under way."""
        total, until = 0.0, -math.inf
        for move in sorted(self.moves, key=lambda move: move.posted_s):
            total += max(0.0, move.done_s - max(until, move.posted_s))
            until = max(until, move.done_s)
        return total


def from_baton(events: Iterable[Event], session: str, prompt_tokens: int, layer_block_bytes: int) -> Handoff:
    """A handoff from the trace of both sides of Baton's channel. `layer_block_bytes`: of one block in one layer."""
    mine = _of(events, session)
    posted: defaultdict[int, deque[Event]] = defaultdict(deque)
    moves = []
    for event in mine:
        if event["event"] == "layer_write":
            posted[event["layer"]].append(event)
        elif event["event"] == "layer_written":
            write = posted[event["layer"]].popleft()
            moves.append(Move(write["t"], event["t"], write["blocks"] * layer_block_bytes))
    ready_s = _only(mine, "received")["t"]
    return Handoff(_forward_end_s(mine, prompt_tokens), ready_s, _some(moves))


def from_nixl(events: Iterable[Event], session: str, prompt_tokens: int) -> Handoff:
    """A handoff from the trace of both sides of a NIXL connector of vLLM: one transfer for the whole prompt."""
    mine = _of(events, session)
    ready_s = _only(mine, "received")["t"]
    size = _only(mine, "moved")["bytes"]
    moves = [Move(_only(mine, "posted")["t"], ready_s, size)]
    return Handoff(_forward_end_s(mine, prompt_tokens), ready_s, _some(moves))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _of(events: Iterable[Event], session: str) -> list[Event]:
    return sorted((event for event in events if event.get("session") == session), key=lambda event: event["t"])


def _only(events: Sequence[Event], name: str) -> Event:
    found = [event for event in events if event["event"] == name]
    if len(found) != 1:
        raise TraceError(f"{len(found)} events {name!r} in a handoff, not 1")
    if found[0].get("ok", True) is False:
        raise TraceError(f"the handoff failed: {found[0]}")
    return found[0]


def _some(moves: Sequence[Move]) -> tuple[Move, ...]:
    if not moves:
        raise TraceError("nothing was moved")
    return tuple(moves)


def _forward_end_s(events: Sequence[Event], prompt_tokens: int) -> float:
    ends = [e["t"] for e in events if e["event"] == "forward_end" and e["computed"] >= prompt_tokens]
    if not ends:
        raise TraceError("the prompt was never computed to its end")
    return float(ends[0])
