"""The spans of one session in a trace: placement, queue, prefill, handoff, decode, and recovery where it is lost.

They are made when a placement of the session is over, from the times that the ingress has noted until then. Nothing is
done for a token. Times are by this process's clock. The time in an engine's queue and that of its prefill are by that
engine's clock, and are laid from the moment of the placement on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from deployments.cluster.meter import Event, engine_times
from deployments.messages import Handoff, Placement, ReplicaInfo, Role
from deployments.tracing import attributes as names

if TYPE_CHECKING:
    from deployments.tracing.tracer import Span, Value

_WELL = ("stop", "length")
"""The outcomes of an answer that is whole."""


@dataclass(slots=True)
class _Attempt:
    """One placement. Its times are 0 until they come. `under`: the span that all but decode's is below.

    `placing`: the open span of the placement. `prefilled_s`: the prompt is computed. `owned_s`: the first output of the
    replica that writes the answer.
    """

    number: int
    under: Span
    placing: Span | None = None
    placement: Placement | None = None
    placed_s: float = 0.0
    engine_s: tuple[float, float] | None = None
    prefilled_s: float = 0.0
    owned_s: float = 0.0

    @property
    def is_split(self) -> bool:
        return self.placement is not None and None not in (self.placement.prefill, self.placement.decode)

    def took(self, role: Role, events: Sequence[Event] | None, stamp_s: float) -> None:
        now_s = monotonic()
        if not self.is_split:
            self.owned_s = self.owned_s or now_s
        elif role is Role.DECODE:
            self.owned_s = self.owned_s or now_s
            return
        if events and not self.prefilled_s:
            self.engine_s = engine_times(events, stamp_s)
        self.prefilled_s = self.prefilled_s or now_s

    def stages(self) -> list[tuple[str, float, float, ReplicaInfo]]:
        """Name, begin, end and replica of every stage, in order; 0 for an end that did not come. Decode's is left 0."""
        placement = self.placement
        assert placement is not None
        begin_s, prefilled_s = self.placed_s, self.prefilled_s
        stages = []
        if self.engine_s is not None:
            queued_s = min(begin_s + self.engine_s[0], prefilled_s)
            stages.append(("queue", begin_s, queued_s, placement.prefiller))
            begin_s, prefilled_s = queued_s, min(queued_s + self.engine_s[1], prefilled_s)
        stages.append(("prefill", begin_s, prefilled_s, placement.prefiller))
        decodes_s = self.prefilled_s
        if self.is_split:
            decodes_s = max(self.owned_s, self.prefilled_s) if self.owned_s else 0.0
            stages.append(("handoff", self.prefilled_s, decodes_s, placement.owner))
        return [*stages, ("decode", decodes_s, 0.0, placement.owner)]


class SessionSpans:
    """Notes the times of one session, and makes its spans. `parent`: the span of its HTTP request."""

    __slots__ = ("_began_s", "_first_s", "_handoff", "_now", "_number", "_recovery", "_span")

    def __init__(self, parent: Span, handoff: Handoff, attributes: Mapping[str, Value]) -> None:
        self._handoff, self._began_s = handoff, monotonic()
        self._span = parent.child("session", self._began_s, attributes)
        self._first_s, self._number = 0.0, 0
        self._recovery: Span | None = None
        self._now: _Attempt | None = None

    @property
    def traceparent(self) -> str:
        """What the spans of replicas have as their parent."""
        return self._span.traceparent

    def asks(self) -> str:
        """It asks for a place. Returns the `traceparent` for the session manager."""
        self._number += 1
        under = self._recovery or self._span
        attempt = self._now = _Attempt(self._number, under)
        attempt.placing = under.child("placement", monotonic(), {names.ATTEMPT: self._number}, kind="client")
        return attempt.placing.traceparent

    def placed(self, placement: Placement, rule: str) -> None:
        """It has a place. `rule`: the rule that keeps it whole; "" for none."""
        attempt = self._now
        assert attempt is not None, "it has asked"
        assert attempt.placing is not None
        attempt.placement, attempt.placed_s = placement, monotonic()
        told: dict[str, Value] = {
            names.MODE: str(placement.mode),
            names.REASON: placement.reason,
            names.CACHED_TOKENS: placement.cached_tokens,
        }
        if rule:
            told[names.RULE] = rule
        attempt.placing.end(attempt.placed_s, told)
        attempt.placing = None

    def took(self, role: Role, tokens: int, events: Sequence[Event] | None, stamp_s: float) -> None:
        """An output came that is not merely the next one; `stamp_s`: when, by the clock of its engine."""
        attempt = self._now
        if not tokens or attempt is None or attempt.placement is None:
            return
        attempt.took(role, events, stamp_s)
        is_pulled = self._handoff is Handoff.PULLED and attempt.is_split
        self._first_s = self._first_s or (attempt.owned_s if is_pulled else attempt.prefilled_s)

    def again(self, cause: str, error: Exception, tokens: int) -> None:
        """This placement has ended, and another one follows. `cause`: `move` or `loss`. `tokens`: it has given."""
        now_s, kind = monotonic(), type(error).__name__
        self._end_attempt(now_s, now_s, cause, kind if cause == "loss" else "", tokens)
        self._recovery = self._span.child("recovery", now_s, {names.CAUSE: cause, names.ATTEMPT: self._number + 1})

    def ended(self, outcome: str, error: Exception | None, heard_s: float, tokens: int, all_tokens: int) -> None:
        """The session is over. `heard_s`: when its last output came. `tokens`: of the last placement's answer."""
        now_s = monotonic()
        kind = type(error).__name__ if error is not None else "interrupted" if outcome == "failed" else ""
        attempt = self._now
        self._end_attempt(now_s, heard_s if outcome in _WELL else now_s, outcome, kind, tokens)
        told: dict[str, Value] = {
            names.OUTCOME: outcome,
            names.OUTPUT_TOKENS: all_tokens,
            names.E2E_S: now_s - self._began_s,
        }
        if self._first_s:
            told[names.TTFT_S] = self._first_s - self._began_s
            told[names.DECODE_S] = max(0.0, heard_s - self._first_s)
        if attempt is not None and attempt.engine_s is not None:
            told[names.QUEUE_S], told[names.PREFILL_S] = attempt.engine_s
        self._span.end(now_s, told, kind)

    def _end_attempt(self, now_s: float, heard_s: float, outcome: str, error: str, tokens: int) -> None:
        """Make the spans of the placement that ends. The stage in which it ended has its error."""
        attempt, self._now = self._now, None
        if attempt is None:
            return
        if attempt.placing is not None:
            attempt.placing.end(now_s, {names.OUTCOME: outcome}, error)
        else:
            self._stages(attempt, now_s, heard_s, outcome, error, tokens)
        if self._recovery is not None:
            self._recovery.end(attempt.owned_s or now_s, error="" if attempt.owned_s else error)
            self._recovery = None

    def _stages(self, attempt: _Attempt, now_s: float, heard_s: float, outcome: str, error: str, tokens: int) -> None:
        assert attempt.placement is not None
        for name, begin_s, end_s, replica in attempt.stages():
            under = self._span if name == "decode" else attempt.under
            told: dict[str, Value] = {
                names.ATTEMPT: attempt.number,
                names.POOL: replica.pool,
                names.REPLICA: replica.replica_id,
            }
            if name == "handoff":
                told[names.FROM_REPLICA] = attempt.placement.prefiller.replica_id
            if name == "decode":
                told[names.OUTPUT_TOKENS] = tokens
                under.child(name, begin_s, told).end(max(begin_s, heard_s), error=error)
            elif end_s:
                under.child(name, begin_s, told).end(end_s)
            else:
                if outcome not in _WELL:  # an answer may be whole after its first token: then nothing is handed over
                    under.child(name, begin_s, told | {names.OUTCOME: outcome}).end(now_s, error=error)
                return
