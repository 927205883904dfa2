"""Where the time of each session goes: of all that run here, and of the newest that have ended.

Nothing is done for a session's tokens one by one. Times are seconds by the monotonic clock of this process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from deployments.cluster.meter import Event, engine_times
from deployments.messages import Mode, Placement, ReplicaInfo, Role

MANAGER, INGRESS = "session manager", "ingress"


@dataclass(slots=True)
class Stay:
    """One placement of a session: from when it was asked for until it was over. A time of 0: not yet.

    `first_s`: its first token came. `landed_s`: decode's first output said that the KV cache is there. `prefilled_s`:
    where decode pulls the KV cache, prefill had it ready. `engine_s`: the time in the queue of the engine that computes
    the prompt, and its prefill; None where the engine does not say. `why`: what ended it, where another one follows.
    """

    asked_s: float
    placed_s: float = 0.0
    mode: str = ""
    reason: str = ""
    prefill: tuple[str, str] | None = None
    decode: tuple[str, str] | None = None
    cached_tokens: int = 0
    expected_ttft_s: float = 0.0
    engine_s: tuple[float, float] | None = None
    prefilled_s: float = 0.0
    first_s: float = 0.0
    landed_s: float = 0.0
    ended_s: float = 0.0
    why: str = ""

    @property
    def replicas(self) -> list[tuple[str, str]]:
        """Pool and id of each."""
        return [each for each in (self.decode, self.prefill) if each is not None]

    @property
    def is_split(self) -> bool:
        return self.mode == Mode.DISAGGREGATED

    def spans(self, end_s: float | None) -> Iterator[dict[str, Any]]:
        """What it was doing when. `end_s`: the session's end; None while it runs."""
        end_s = self.ended_s or end_s
        yield _span("placement", MANAGER, self.asked_s, self.placed_s or end_s)
        if not self.placed_s:
            return
        prompt_on, answer_on = (self.prefill or self.decode), (self.decode or self.prefill)
        assert prompt_on is not None, "a placement names at least one replica"
        assert answer_on is not None, "a placement names at least one replica"
        computed_s = self.prefilled_s or self.first_s
        yield from self._prompt(prompt_on[1], computed_s or end_s)
        if self.is_split and computed_s:
            landed_s = max(computed_s, self.landed_s) if self.landed_s else end_s
            yield _span("handoff", answer_on[1], computed_s, landed_s)
        if self.first_s and (self.landed_s or not self.is_split):
            yield _span("decode", answer_on[1], max(self.first_s, self.landed_s), end_s)
        if self.why:
            yield _span("placed again", INGRESS, self.ended_s, self.ended_s, self.why)

    def _prompt(self, where: str, end_s: float | None) -> Iterator[dict[str, Any]]:
        """The wait in the engine's queue and the prefill. Without the engine's word, all of it is prefill."""
        queue_s, prefill_s = self.engine_s or (0.0, 0.0)
        began_s = self.placed_s
        if queue_s and end_s is not None:
            began_s = max(self.placed_s, end_s - prefill_s)
            yield _span("queue", where, self.placed_s, min(began_s, self.placed_s + queue_s))
        note = f"{self.cached_tokens} tokens expected in its cache" if self.cached_tokens else ""
        yield _span("prefill", where, began_s, end_s, note)


def _span(what: str, where: str, from_s: float, to_s: float | None, note: str = "") -> dict[str, Any]:
    return {"what": what, "where": where, "from_s": from_s, "to_s": to_s, "note": note}


@dataclass(slots=True, eq=False)
class Timeline:
    """One session. `sent`: the tokens that the client has; it grows. `arrived_s`: when its request had been read.

    `pulls`: decode reads the KV cache of a split session, and gives every token.
    """

    request_id: str
    session_id: str
    prompt_tokens: int
    arrived_s: float
    sent: Sized
    pulls: bool = False
    began_s: float = field(init=False)
    first_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = ""
    error: str = ""
    stays: list[Stay] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began_s = monotonic()
        self.stays.append(Stay(self.began_s))

    def placed(self, placement: Placement) -> None:
        """It has a place, the first one or another."""
        stay = self.stays[-1]
        stay.placed_s, stay.mode, stay.reason = monotonic(), str(placement.mode), placement.reason
        stay.prefill, stay.decode = _named(placement.prefill), _named(placement.decode)
        stay.cached_tokens, stay.expected_ttft_s = placement.cached_tokens, placement.forecast.ttft_s

    def took(self, role: Role, events: Sequence[Event] | None, stamp_s: float) -> None:
        """Tokens came that are not merely the next ones. `stamp_s`: when, by the clock of their engine."""
        stay, now_s = self.stays[-1], monotonic()
        if stay.is_split and role is Role.DECODE:
            stay.landed_s = stay.landed_s or now_s
            if self.pulls:
                self._first(stay, now_s)
            return
        if events and stay.engine_s is None:
            stay.engine_s = engine_times(events, stamp_s)
        if stay.is_split and self.pulls:
            stay.prefilled_s = stay.prefilled_s or now_s
        else:
            self._first(stay, now_s)

    def _first(self, stay: Stay, now_s: float) -> None:
        stay.first_s = stay.first_s or now_s
        self.first_s = self.first_s or now_s

    def again(self, cause: str, error: Exception) -> None:
        """It is placed again. `cause`: `move` or `loss`. `error`: why."""
        stay = self.stays[-1]
        stay.ended_s, stay.why = monotonic(), f"{cause}: {error}"
        self.stays.append(Stay(stay.ended_s))

    def ended(self, outcome: str, error: str) -> None:
        """It is over. `error`: what the client was told; "" for none."""
        self.ended_s, self.outcome, self.error = monotonic(), outcome, error
        self.sent = range(len(self.sent))

    def replicas(self) -> dict[str, str]:
        """The pools of the replicas that it was on, by replica."""
        return {replica: pool for stay in self.stays for pool, replica in stay.replicas}

    def shown(self) -> dict[str, Any]:
        """JSON. Times are seconds since the request's arrival; None where it is not over.

        `{"session_id", "outcome", "error", "arrived_at", "prompt_tokens", "output_tokens", "ttft_s", "total_s",
        "age_s", "placements": [{"at_s", "mode", "reason", "prefill", "decode", "expected_ttft_s"}], "spans": [{"what",
        "where", "from_s", "to_s", "note"}]}`
        """
        end_s = self.ended_s or None
        spans = [_span("frontend", INGRESS, self.arrived_s, self.began_s)]
        spans += [span for stay in self.stays for span in stay.spans(end_s)]
        now_s = monotonic()
        arrived_at = time.time() - (now_s - self.arrived_s)
        return {
            "session_id": self.session_id,
            "outcome": self.outcome or None,
            "error": self.error or None,
            "arrived_at": datetime.fromtimestamp(arrived_at, UTC).isoformat(timespec="milliseconds"),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": len(self.sent),
            "ttft_s": since(self.arrived_s, self.first_s or None),
            "total_s": since(self.arrived_s, end_s),
            "age_s": since(self.arrived_s, now_s),
            "placements": [self._placement(stay) for stay in self.stays if stay.placed_s],
            "spans": [
                span | {"from_s": since(self.arrived_s, span["from_s"]), "to_s": since(self.arrived_s, span["to_s"])}
                for span in spans
            ],
        }

    def _placement(self, stay: Stay) -> dict[str, Any]:
        return {
            "at_s": since(self.arrived_s, stay.placed_s),
            "mode": stay.mode,
            "reason": stay.reason,
            "prefill": stay.prefill and stay.prefill[1],
            "decode": stay.decode and stay.decode[1],
            "expected_ttft_s": round(stay.expected_ttft_s, 6),
        }


def since(begin_s: float, at_s: float | None) -> float | None:
    """Seconds from one moment to another, to the microsecond."""
    return None if at_s is None else round(at_s - begin_s, 6)


def _named(replica: ReplicaInfo | None) -> tuple[str, str] | None:
    return None if replica is None else (replica.pool, replica.replica_id)


class Timelines:
    """The timelines of one ingress. `kept`: how many of ended sessions, the newest."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._ended: deque[Timeline] = deque()
        self._by_name: dict[str, list[Timeline]] = {}

    def __len__(self) -> int:
        return len({id(each) for named in self._by_name.values() for each in named})

    def begin(self, timeline: Timeline) -> Timeline:
        """Keep the timeline of a session that begins."""
        for name in {timeline.request_id, timeline.session_id}:
            self._by_name.setdefault(name, []).append(timeline)
        return timeline

    def end(self, timeline: Timeline) -> None:
        """A session has ended; the oldest that did is forgotten."""
        self._ended.append(timeline)
        while len(self._ended) > self._kept:
            self._forget(self._ended.popleft())

    def find(self, name: str) -> list[Timeline]:
        """Those of a request's id, or of a session's, in the order in which they began."""
        return list(self._by_name.get(name, ()))

    def _forget(self, timeline: Timeline) -> None:
        for name in {timeline.request_id, timeline.session_id}:
            named = self._by_name[name]
            named.remove(timeline)
            if not named:
                del self._by_name[name]
