"""Turns the arrival of every token into the figures of a run. Pure: answers in, numbers out. Times are in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from load_tests.traffic.client import Answer

LEVELS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is good when its answer is whole, its first token came within `ttft_s`, and the others every `tpot_s`
    on average."""

    ttft_s: float
    tpot_s: float

    def met(self, answer: Answer) -> bool:
        """Whether an answer is good."""
        return not answer.error and ttft_s(answer) <= self.ttft_s and tpot_s(answer) <= self.tpot_s


def ttft_s(answer: Answer) -> float:
    """From when the request was due to its first token."""
    return answer.events[0][0] - answer.due_s


def e2e_s(answer: Answer) -> float:
    """From when the request was due to its last token."""
    return answer.events[-1][0] - answer.due_s


def tpot_s(answer: Answer) -> float:
    """Time per output token: (last - first) / (n - 1); 0 for one token."""
    return (answer.events[-1][0] - answer.events[0][0]) / max(1, answer.tokens - 1)


def gaps_s(answer: Answer) -> list[float]:
    """The time from each token to the next. Tokens of one event arrive together, with gaps of 0."""
    gaps = [0.0] * (answer.events[0][1] - 1)
    for (before_s, _), (at_s, count) in zip(answer.events, answer.events[1:], strict=False):
        gaps += [at_s - before_s] + [0.0] * (count - 1)
    return gaps


def max_gap_s(answer: Answer) -> float:
    """The longest gap inside an answer; 0 for one token."""
    return max(gaps_s(answer), default=0.0)


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """`NAME_p50_s` and so on; None where there are no values."""
    found = np.percentile(values, LEVELS) if len(values) else [None] * len(LEVELS)
    return {f"{name}_p{level}_s": rounded(value) for level, value in zip(LEVELS, found, strict=True)}


def tokens_per_s(answers: Sequence[Answer], begin_s: float, end_s: float) -> float:
    """Tokens that arrived in a window, per second of it."""
    arrived = sum(count for answer in answers for at_s, count in answer.events if begin_s <= at_s < end_s)
    return arrived / (end_s - begin_s)


def figures(
    answers: Sequence[Answer], begin_s: float, end_s: float, objectives: Mapping[str, Objective] | None = None
) -> dict[str, Any]:
    """Figures of the requests that were due in a window. Latencies are of whole answers.

    `goodput_rps`: requests per second of the window that met the objectives of their kind. A request that failed is
    not good and counts under `failed`. `late_p99_s`: how much later than due the client sent them.
    """
    counted = [answer for answer in answers if begin_s <= answer.due_s < end_s]
    whole = [answer for answer in counted if not answer.error]
    several = [answer for answer in whole if answer.tokens > 1]
    goodput = sum((objectives or {})[answer.kind].met(answer) for answer in whole) if objectives else None
    errors = [answer.error for answer in counted if answer.error]
    return {
        "requests": len(counted),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        **percentiles("ttft", [ttft_s(answer) for answer in whole]),
        **percentiles("tpot", [tpot_s(answer) for answer in several]),
        **percentiles("itl", [gap for answer in several for gap in gaps_s(answer)]),
        **percentiles("max_gap", [max_gap_s(answer) for answer in several]),
        **percentiles("e2e", [e2e_s(answer) for answer in whole]),
        "e2e_mean_s": rounded(float(np.mean([e2e_s(answer) for answer in whole])) if whole else None),
        "goodput_rps": None if goodput is None else rounded(goodput / (end_s - begin_s)),
        "output_tokens_per_s": rounded(tokens_per_s(answers, begin_s, end_s)),
        "late_p99_s": percentiles("late", [answer.sent_s - answer.due_s for answer in counted])["late_p99_s"],
    }


def by_kind(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Answers by their kind."""
    kinds: dict[str, list[Answer]] = {}
    for answer in answers:
        kinds.setdefault(answer.kind, []).append(answer)
    return kinds


def over_rounds(rounds: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """The median of each figure over the rounds that have it. `spread` has its least and greatest value."""
    result: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    for name in rounds[0]:
        values = [value for each in rounds if (value := each[name]) is not None]
        result[name] = rounded(float(np.median(values))) if values else None
        spread[name] = [min(values), max(values)] if values else None
    return result | {"spread": spread, "rounds": len(rounds)}


def rounded(value: float | None) -> float | None:
    """The value, rounded to four significant digits."""
    return None if value is None else float(f"{value:.4g}")
