"""Traces made from a seed: independent arrivals, bursts, and conversations whose turns repeat all that was said."""

from __future__ import annotations

import random
from dataclasses import dataclass

from load_tests.simulator.traces import Trace, TraceRequest

BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths in tokens: median and sigma, within bounds."""

    median: float
    sigma: float
    least: int = 1
    most: int = 8192

    def draw(self, rng: random.Random) -> int:
        return min(max(round(self.median * rng.lognormvariate(0.0, self.sigma)), self.least), self.most)


PROMPTS, ANSWERS = Lengths(1000, 1.0, least=16, most=16384), Lengths(200, 0.8, most=2048)


def poisson(
    requests_per_s: float, count: int, seed: int, prompts: Lengths = PROMPTS, answers: Lengths = ANSWERS
) -> Trace:
    """Independent requests without shared prefixes."""
    rng = random.Random(seed)
    at_s, requests = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(requests_per_s)
        requests.append(TraceRequest(at_s, prompts.draw(rng), answers.draw(rng)))
    return Trace("poisson", BLOCK_TOKENS, tuple(requests))


def burst(
    requests_per_s: float,
    count: int,
    seed: int,
    size: int = 32,
    prompts: Lengths = PROMPTS,
    answers: Lengths = ANSWERS,
) -> Trace:
    """Herds: `size` requests at the same moment. The herds are a Poisson process; the mean rate is the given one."""
    rng = random.Random(seed)
    at_s, requests = 0.0, []
    for index in range(count):
        at_s += rng.expovariate(requests_per_s / size) if index % size == 0 else 0.0
        requests.append(TraceRequest(at_s, prompts.draw(rng), answers.draw(rng)))
    return Trace("burst", BLOCK_TOKENS, tuple(requests))


def conversations(
    requests_per_s: float, count: int, seed: int, turns: int = 5, pause_s: float = 10.0, system_tokens: int = 512
) -> Trace:
    """Conversations of `turns` turns. Each prompt is the one before, its answer and a new question.

    All begin with the same system prompt. Pauses between the turns are exponential. The rate is reached after a few
    pauses, because at first there are only first turns.
    """
    rng = random.Random(seed)
    begun_s, requests = 0.0, []
    for talk in range(count):  # more than needed: late turns of early conversations come first
        begun_s += rng.expovariate(requests_per_s / turns)
        at_s, prompt = begun_s, system_tokens
        for _ in range(turns):
            prompt += Lengths(200, 1.0, most=4096).draw(rng)
            answer = ANSWERS.draw(rng)
            requests.append(TraceRequest(at_s, prompt, answer, _hashes(talk, prompt, system_tokens), f"client-{talk}"))
            prompt += answer
            at_s += rng.expovariate(1.0 / pause_s)
    ordered = sorted(requests, key=lambda request: request.at_s)[:count]
    return Trace("conversations", BLOCK_TOKENS, tuple(ordered))


def _hashes(talk: int, prompt_tokens: int, system_tokens: int) -> tuple[int, ...]:
    shared = system_tokens // BLOCK_TOKENS
    return tuple(
        block if block < shared else ((talk + 1) << 16) + block for block in range(prompt_tokens // BLOCK_TOKENS)
    )
