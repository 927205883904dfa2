"""Requests and their times, made from a seed, so that every peer gets the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from load_tests.simulator.traces import Trace
from load_tests.traffic.client import Ask, Talk

TOKEN_IDS = (100, 40_000)  # above the special tokens, within the vocabulary of SmolLM2


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompt and answer in tokens, and the kind under which figures are kept."""

    kind: str
    prompt_tokens: int
    output_tokens: int


SHORT, LONG = Shape("short", 40, 60), Shape("long", 1000, 8)
LONG_SHARE = 0.35 / (0.35 + 1.2)
CLOSED = Shape("closed", 256, 32)
TALK = Shape("talk", 384, 32)
TURNS, QUESTION_TOKENS = 4, 100


def prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    """Random token ids: no prefix cache has them."""
    return tuple(rng.randrange(*TOKEN_IDS) for _ in range(tokens))


def prompt_of(tokens: int, seed: int) -> list[int]:
    """The prompt that belongs to a length and a seed."""
    return list(prompt(random.Random(f"{seed} {tokens}"), tokens))


def asks(shape: Shape, seed: int) -> Iterator[Ask]:
    """An endless series of requests of one shape, all due at the start of the run."""
    rng = random.Random(f"{seed} {shape}")
    while True:
        yield Ask(0.0, prompt(rng, shape.prompt_tokens), shape.output_tokens, shape.kind)


def talks(seed: int) -> Iterator[Talk]:
    """An endless series of conversations of four turns: prompts of 384, 516, 648 and 780 tokens."""
    rng = random.Random(f"{seed} {TALK}")
    while True:
        lengths = (TALK.prompt_tokens, *[QUESTION_TOKENS] * (TURNS - 1))
        yield Talk(tuple(prompt(rng, tokens) for tokens in lengths), TALK.output_tokens, TALK.kind)


def poisson(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Arrival times in seconds, independent of each other, at a mean rate of `rate` a second."""
    return _arrivals(rate, seconds, rng, 1)


def bursts(rate: float, seconds: float, rng: random.Random, size: int = 8) -> list[float]:
    """Arrival times in herds: `size` arrivals at each moment. Moments are Poisson, and the mean rate is `rate`."""
    return _arrivals(rate, seconds, rng, size)


def _arrivals(rate: float, seconds: float, rng: random.Random, size: int) -> list[float]:
    at_s, times = rng.expovariate(rate / size), []
    while at_s < seconds:
        times += [at_s] * size
        at_s += rng.expovariate(rate / size)
    return times


def mixed(
    rate: float,
    seconds: float,
    seed: int,
    arrivals: Callable[[float, float, random.Random], list[float]] = poisson,
) -> list[Ask]:
    """Long prompts with short answers among short prompts with long answers: 35 of 155 are long.

    Each kind has its own arrivals. `rate` is that of both together.
    """
    made = []
    for shape, share in ((SHORT, 1.0 - LONG_SHARE), (LONG, LONG_SHARE)):
        rng = random.Random(f"{seed} {rate} {shape.kind}")
        for at_s in arrivals(rate * share, seconds, rng):
            made.append(Ask(at_s, prompt(rng, shape.prompt_tokens), shape.output_tokens, shape.kind))
    return sorted(made, key=lambda ask: ask.at_s)


def unlike(asked: list[Ask], attempt: int) -> list[Ask]:
    """The same requests, which are of token ids, with other tokens, so that no cache has them from another attempt.

    Tokens that two prompts shared before are still shared.
    """
    least, most = TOKEN_IDS
    turn = attempt * 7919  # every token id moves on by this much and wraps around; 7919 is a prime
    moved = {token: least + (token - least + turn) % (most - least) for ask in asked for token in _ids(ask)}
    return [replace(ask, prompt=tuple(moved[token] for token in _ids(ask))) for ask in asked]


def _ids(ask: Ask) -> tuple[int, ...]:
    assert not isinstance(ask.prompt, str)
    return ask.prompt


def replay(trace: Trace, rate: float, seconds: float, max_model_len: int, seed: int) -> list[Ask]:
    """A trace's requests at a mean rate. Requests that the model cannot take are left out.

    Blocks that two prompts share have the same tokens, so a prefix cache finds what it would have found.
    """
    fitting = trace.fitting(max_model_len)
    made = []
    for number, request in enumerate(fitting.scaled(rate, max(1, round(rate * seconds))).requests):
        blocks = (prompt(random.Random(f"{seed} {block}"), trace.block_tokens) for block in request.hashes)
        known = tuple(token for block in blocks for token in block)
        own = prompt(random.Random(f"{seed} request {number}"), request.prompt_tokens - len(known))
        made.append(Ask(request.at_s, known + own, request.output_tokens, trace.name))
    return made
