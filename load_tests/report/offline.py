"""Turns runs of offline work into the figures of the benchmark `offline`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from load_tests.report.handoffs import median

COUNTED = 0.9
"""The share of the tokens whose time counts: the last ones are of a few long answers, and as slow in every way."""
DIGITS = {"output_tokens_per_s": 1, "whole": 1, "bubble_share": 4, "mixed_share": 4, "seconds": 2}
LEAST_ON_ONE_STAGE, LEAST_ON_SEVERAL = 0.97, 1.15
"""The least throughput of phases over that of the best token budget."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of one way. Seconds count from the first request's way to the engine.

    `times_s`: when each token came. `busy_s`: of each stage, until the end. `steps`: of each step with something in it,
    its prompt tokens and the answers that it went on with. `answers`: tokens, in the order of the requests.
    """

    seconds: float
    times_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    preemptions: int
    steps: tuple[tuple[int, int], ...]
    answers: tuple[tuple[int, ...], ...]


def figures(ran: Ran) -> dict[str, Any]:
    """What one run was. `mixed_share`: of the steps with prompts, those that also went on with answers."""
    count = math.ceil(COUNTED * len(ran.times_s))
    kinds = [kind(*step) for step in ran.steps]
    prompts = sum(each != "decode" for each in kinds)
    found = {
        "output_tokens_per_s": count / sorted(ran.times_s)[count - 1],
        "whole": len(ran.times_s) / ran.seconds,
        "bubble_share": 1.0 - sum(ran.busy_s) / len(ran.busy_s) / ran.seconds,
        "preemptions": ran.preemptions,
        "switches": sum(one != other for one, other in pairwise(kinds)),
        "mixed_share": kinds.count("mixed") / prompts if prompts else 0.0,
        "steps": len(kinds),
        "seconds": ran.seconds,
    }
    return _rounded(found)


def kind(prompt_tokens: int, answers: int) -> str:
    """What a step was: `prefill`, `decode` or `mixed`. A last piece of a prompt that is one token is an answer here."""
    if not prompt_tokens:
        return "decode"
    return "mixed" if answers else "prefill"


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure over the rounds, and the throughput of each round."""
    middle = _rounded({name: median([row[name] for row in rows]) for name in rows[0]})
    return middle | {"rounds": [row["output_tokens_per_s"] for row in rows]}


def _rounded(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, DIGITS[name]) if name in DIGITS else value for name, value in found.items()}


def over(rows: Mapping[str, Mapping[str, Any]], way: str, other: str) -> float:
    """The throughput of one way over that of another: the median of the ratios of each round."""
    pairs = zip(rows[way]["rounds"], rows[other]["rounds"], strict=True)
    return round(median([one / two for one, two in pairs]), 4)


def ratios(rows: Mapping[str, Mapping[str, Any]], ours: Sequence[str]) -> dict[str, float]:
    """Each of our ways over vLLM's, by `OURS_over_THEIRS`."""
    theirs = [way for way in rows if way not in ours]
    return {f"{way}_over_{other}": over(rows, way, other) for way in ours for other in theirs}


def unlike(answers: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int:
    """How many answers are not those of the reference."""
    return sum(tuple(one) != tuple(other) for one, other in zip(answers, reference, strict=True))


def targets(pp: Mapping[str, Mapping[str, Any]], way: str) -> dict[str, bool]:
    """Which targets one of our ways meets. Those of what was not measured are left out."""
    limits = {"1": LEAST_ON_ONE_STAGE, "2": LEAST_ON_SEVERAL}
    return {
        f"pp_{stages}_at_least_{limit}": pp[stages]["ratios"][f"{way}_over_tuned"] >= limit
        for stages, limit in limits.items()
        if stages in pp
    }
