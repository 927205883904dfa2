"""How many tokens a request of an engine will write yet, by the predictor of the placement policy. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.messages import SessionRequest
from deployments.policy.prediction.answer_length import LengthPredictor
from deployments.policy.temporal.memory import AT, POINT_STEPS, Outlook


@dataclass(frozen=True, slots=True)
class Job:
    """A request, as an engine knows it. `max_tokens`: of its answer."""

    key: str
    prompt_tokens: int
    max_tokens: int


class AnswerLengths:
    """Predicts what is left of answers, and learns from those that end.

    The prediction is corrected while an answer is written: of the answers that are like it, only those that were longer
    than what is written already count.
    """

    def __init__(self, predictor: LengthPredictor | None = None) -> None:
        self._predictor = predictor or LengthPredictor()

    def left(self, job: Job, written: int) -> int:
        """The tokens that an answer of `written` tokens is expected to get yet, at least 1."""
        if written >= job.max_tokens:
            return 1
        return max(math.ceil(self._predictor.guess(_request(job, written)).mean), 1)

    def outlook(self, job: Job, written: int) -> Outlook:
        """How long an answer of `written` tokens goes on."""
        most = max(job.max_tokens - written, 1)
        return Outlook(self._predictor.lasting(_request(job, written), AT - POINT_STEPS), most)

    def ended(self, job: Job, written: int, by_limit: bool) -> None:
        """An answer ended. `by_limit`: at its `max_tokens`. One that was cut short in another way teaches nothing."""
        self._predictor.observe(_request(job, 0), written, by_limit)


def _request(job: Job, written: int) -> SessionRequest:
    left = max(job.max_tokens - written, 1)
    return SessionRequest(job.key, job.prompt_tokens + written, left, answered_tokens=written)
