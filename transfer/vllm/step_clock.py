"""What each step of an engine computes and how long it takes, from the two moments of it that a connector sees.

It imports no vLLM. It reads the fields of vLLM's `SchedulerOutput` that `Scheduled` names, and returns as much of a
`KVConnectorStats` as vLLM's scheduler asks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, Protocol


class Scheduled(Protocol):
    """What one step computes: tokens by request id, of requests that are new to the engine and of known ones.

    A new request has `req_id` and `num_computed_tokens`, as before the step. The known ones are two lists, `req_ids`
    and `num_computed_tokens`.
    """

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: seconds, prompt tokens, the tokens before each of them, sequences decoding, the tokens these hold.

    `pins`: how many blocks each pinned prefix holds; None: no news.
    """

    seconds: float
    prefill_tokens: int
    prefill_context: int
    decode_sequences: int
    decode_context: int
    pins: dict[str, int] | None = None

    def with_pins(self, pins: dict[str, int] | None) -> StepReport:
        """The same, with this news of pins."""
        return self if pins is None else replace(self, pins=pins)

    def is_empty(self) -> bool:
        """Never: there is no report of a step with nothing in it."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """As it travels in vLLM's statistics."""
        fields = self.prefill_tokens, self.prefill_context, self.decode_sequences, self.decode_context
        step = {"step": (self.seconds, *fields)}
        return step if self.pins is None else {**step, "pins": self.pins}


@dataclass(frozen=True, slots=True)
class _Begun:
    at_s: float
    follows: bool
    counts: tuple[int, int, int, int]


class StepClock:
    """Steps begin and end in the same order; with asynchronous scheduling one begins before the last has ended.

    A step that goes on with a request of the step before began when that one ended: what lies between (outputs,
    scheduling) is a cost of steps, too. Any other step may follow an idle time, and is timed from its own beginning.
    """

    def __init__(self) -> None:
        self._open: deque[_Begun] = deque()
        self._last: Container[str] = ()
        self._ended_s = float("-inf")

    @property
    def is_computing(self) -> bool:
        """Whether an open step has something in it. With pipeline stages, another step is scheduled meanwhile."""
        return any(any(begun.counts) for begun in self._open)

    def begin(self, step: Scheduled, now_s: float) -> None:
        """A step was scheduled, perhaps with nothing in it."""
        known = step.scheduled_cached_reqs.req_ids
        follows = any(request_id in self._last for request_id in known)
        self._last = step.num_scheduled_tokens
        self._open.append(_Begun(now_s, follows, _counts(step)))

    def end(self, now_s: float) -> StepReport | None:
        """The oldest open step is over. None when there was nothing in it."""
        if not self._open:
            return None
        begun = self._open.popleft()
        began_s = self._ended_s if begun.follows else max(begun.at_s, self._ended_s)
        self._ended_s = now_s
        return StepReport(now_s - began_s, *begun.counts) if any(begun.counts) else None


def _counts(step: Scheduled) -> tuple[int, int, int, int]:
    """A request that computes one token counts as decoding, also one of a prompt: it costs the same."""
    prefill_tokens = prefill_context = decode_sequences = decode_context = 0
    known = step.scheduled_cached_reqs
    computed = [(new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs]
    computed += zip(known.req_ids, known.num_computed_tokens, strict=True)
    for request_id, before in computed:
        tokens = step.num_scheduled_tokens[request_id]
        if tokens == 1:
            decode_sequences += 1
            decode_context += before + 1
        else:
            prefill_tokens += tokens
            prefill_context += tokens * before + tokens * (tokens - 1) // 2
    return prefill_tokens, prefill_context, decode_sequences, decode_context
