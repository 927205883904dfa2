"""Traces made from a seed: independent arrivals, bursts, and conversations whose turns repeat all that was said."""

from __future__ import annotations

import random
from dataclasses import dataclass

from load_tests.simulator.metrics import HOT
from load_tests.simulator.traces import Trace, TraceRequest

BLOCK_TOKENS = 128
OF_LINES = 1 << 36
"""The hashes of lines begin here: no other trace has those."""


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
            requests.append(_turn(at_s, talk, prompt, answer, system_tokens))
            prompt += answer
            at_s += rng.expovariate(1.0 / pause_s)
    ordered = sorted(requests, key=lambda request: request.at_s)[:count]
    return Trace("conversations", BLOCK_TOKENS, tuple(ordered))


def agents(requests_per_s: float, count: int, seed: int, turns: int = 12, pause_s: float = 3.0) -> Trace:
    """Agents that call tools: prompts of 33,000 tokens in the mean, of which nine tenths were there before.

    Each prompt is the one before, its answer of some 450 tokens and a tool's output. All begin with the same 4,096
    tokens.
    """
    rng = random.Random(seed)
    begun_s, requests = 0.0, []
    for task in range(count):
        begun_s += rng.expovariate(requests_per_s / turns)
        at_s, prompt = begun_s, 4096 + Lengths(10_000, 0.5, most=40_000).draw(rng)
        for _ in range(turns):
            answer = Lengths(400, 0.5, least=16, most=2048).draw(rng)
            requests.append(_turn(at_s, task, prompt, answer, 4096))
            prompt += answer + Lengths(2400, 0.6, least=64, most=16_384).draw(rng)
            at_s += rng.expovariate(1.0 / pause_s)
    ordered = sorted(requests, key=lambda request: request.at_s)[:count]
    return Trace("agents", BLOCK_TOKENS, tuple(ordered))


def shared(requests_per_s: float, count: int, seed: int, documents: int = 200) -> Trace:
    """Short answers to questions about long documents: of 1 to 20 tokens. Three quarters of a prompt are a document.

    Documents are asked for by Zipf's law.
    """
    rng = random.Random(seed)
    lengths = [Lengths(9000, 0.5, least=1024, most=48_000).draw(rng) for _ in range(documents)]
    weights = [1.0 / (rank + 1) for rank in range(documents)]
    at_s, requests = 0.0, []
    for index in range(count):
        at_s += rng.expovariate(requests_per_s)
        document = rng.choices(range(documents), weights)[0]
        blocks = lengths[document] // BLOCK_TOKENS
        prompt = lengths[document] * 4 // 3
        own = ((documents + index + 1) << 16) + blocks
        hashes = (
            *(((document + 1) << 16) + block for block in range(blocks)),
            *range(own, own + prompt // BLOCK_TOKENS - blocks),
        )
        requests.append(TraceRequest(at_s, prompt, rng.randint(1, 20), hashes))
    return Trace("shared", BLOCK_TOKENS, tuple(requests))


def hot(requests_per_s: float, count: int, seed: int, share: float = 0.8, period: int = 400) -> Trace:
    """Four fifths of the requests ask about one document of 32,768 tokens, and after each `period`, about the next.

    One request asks about each document half a period before the others do, so that one replica has it. The rest of the
    requests have prompts of their own. All answers are short.
    """
    rng = random.Random(seed)
    at_s, requests, document = 0.0, [], 32_768 // BLOCK_TOKENS
    for index in range(count):
        at_s += rng.expovariate(requests_per_s)
        is_first = index % period == period // 2
        is_hot = rng.random() < share or is_first
        shared = document if is_hot else 0
        prompt = shared * BLOCK_TOKENS + Lengths(2000 if is_hot else 4000, 0.6, least=128, most=32_768).draw(rng)
        own = ((index + 1) << 20) + (1 << 19)
        hashes = (
            *(((index // period + 1 + is_first) << 20) + block for block in range(shared)),
            *range(own, own + prompt // BLOCK_TOKENS - shared),
        )
        client = f"{HOT}{index}" if is_hot and not is_first else f"client-{index}"
        requests.append(TraceRequest(at_s, prompt, rng.randint(16, 128), hashes, client))
    return Trace("hot", BLOCK_TOKENS, tuple(requests))


def documents(requests_per_s: float, count: int, seed: int, share: float = 0.75, period: int = 200) -> Trace:
    """Three of four requests ask about one of four documents of 12,288 tokens, the first of them most of all.

    After each `period` requests the oldest document gives its place to a new one, which no replica has. The rest of the
    requests have prompts of their own. All answers are short. No constant of Baton was chosen by this trace.
    """
    rng = random.Random(seed)
    at_s, requests, document = 0.0, [], 12_288 // BLOCK_TOKENS
    places = [0, 1, 2, 3]
    for index in range(count):
        at_s += rng.expovariate(requests_per_s)
        if index and index % period == 0:
            places[index // period % len(places)] += len(places)
        is_hot = rng.random() < share
        shared = document if is_hot else 0
        asked = rng.choices(places, (4, 2, 1, 1))[0]
        prompt = shared * BLOCK_TOKENS + Lengths(1000 if is_hot else 4000, 0.6, least=128, most=32_768).draw(rng)
        own = ((index + 1) << 20) + (1 << 19)
        hashes = (
            *(((asked + 1) << 20) + block for block in range(shared)),
            *range(own, own + prompt // BLOCK_TOKENS - shared),
        )
        client = f"{HOT}{index}" if is_hot else f"client-{index}"
        requests.append(TraceRequest(at_s, prompt, rng.randint(16, 128), hashes, client))
    return Trace("documents", BLOCK_TOKENS, tuple(requests))


def lines(count: int, prompt: int, answer: int, at_s: float = 0.0) -> list[TraceRequest]:
    """Lines of a batch, which come at once. Each has a prompt and an answer of its own, of so many tokens."""
    made = []
    for number in range(count):
        first = OF_LINES + (number << 20)
        blocks = range(first, first + (prompt + answer) // BLOCK_TOKENS)
        hashes, answered = tuple(blocks[: prompt // BLOCK_TOKENS]), tuple(blocks[prompt // BLOCK_TOKENS :])
        made.append(TraceRequest(at_s + 0.001 * number, prompt, answer, hashes, "batch", answered))
    return made


def _turn(at_s: float, talk: int, prompt: int, answer: int, system_tokens: int) -> TraceRequest:
    """One turn, whose prompt and answer the next turn repeats."""
    whole, blocks = _hashes(talk, prompt + answer, system_tokens), prompt // BLOCK_TOKENS
    return TraceRequest(at_s, prompt, answer, whole[:blocks], f"client-{talk}", whole[blocks:])


def _hashes(talk: int, prompt_tokens: int, system_tokens: int) -> tuple[int, ...]:
    shared = system_tokens // BLOCK_TOKENS
    return tuple(
        block if block < shared else ((talk + 1) << 16) + block for block in range(prompt_tokens // BLOCK_TOKENS)
    )
