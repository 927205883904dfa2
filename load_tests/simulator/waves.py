"""Traces whose rate changes on purpose: waves, bursts and steady load; and real ones in their own time, but larger."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

from load_tests.simulator.synthetic import ANSWERS, BLOCK_TOKENS, PROMPTS
from load_tests.simulator.traces import HASH_BITS, Trace, TraceRequest

EVERY_S = 900.0
"""From one burst to the next."""
SHIFT_S = 20.0
"""A copy of a trace comes up to so many seconds later than the trace."""


def changing(name: str, per_s: Callable[[float], float], most_per_s: float, length_s: float, seed: int) -> Trace:
    """Independent requests whose rate is `per_s` of the time, at most `most_per_s` (thinning, Lewis and Shedler)."""
    rng, at_s, requests = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(most_per_s)) < length_s:
        if rng.random() * most_per_s < per_s(at_s):
            requests.append(TraceRequest(at_s, PROMPTS.draw(rng), ANSWERS.draw(rng)))
    return Trace(name, BLOCK_TOKENS, tuple(requests))


def wave(per_s: float, length_s: float, season_s: float, seed: int) -> Trace:
    """A day: from a quarter of `per_s` at its low to all of it at its high."""

    def rate(at_s: float) -> float:
        return per_s * (0.625 - 0.375 * math.cos(2 * math.pi * at_s / season_s))

    return changing("wave", rate, per_s, length_s, seed)


def bursts(per_s: float, length_s: float, seed: int, every_s: float = EVERY_S, lasts_s: float = 180.0) -> Trace:
    """A quarter of `per_s`, and all of it for the last `lasts_s` of every `every_s`."""

    def rate(at_s: float) -> float:
        return per_s if at_s % every_s >= every_s - lasts_s else per_s / 4

    return changing("bursts", rate, per_s, length_s, seed)


def steady(per_s: float, length_s: float, seed: int) -> Trace:
    """The same rate all the time."""
    return changing("steady", lambda at_s: per_s, per_s, length_s, seed)


def larger(trace: Trace, times: int, length_s: float, seed: int) -> Trace:
    """The first `length_s` of a trace in its own time, so many `times` at once: each copy comes a little later.

    Every copy has its own hashes, so conversations stay as they are.
    """
    rng, first_s, requests = random.Random(seed), trace.requests[0].at_s, []
    shifts = [0.0] + [rng.uniform(0.0, SHIFT_S) for _ in range(times - 1)]
    for request in trace.requests:
        at_s = request.at_s - first_s
        if at_s > length_s:
            break
        for copy, shift_s in enumerate(shifts):
            hashes = tuple(block + (copy << HASH_BITS) for block in request.hashes)
            requests.append(replace(request, at_s=at_s + shift_s, hashes=hashes))
    return Trace(trace.name, trace.block_tokens, tuple(sorted(requests, key=lambda each: each.at_s)))
