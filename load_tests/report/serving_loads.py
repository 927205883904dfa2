"""The loads of the serving benchmark: what each puts on a peer, and the figures that it gives."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from load_tests.report.serving_rounds import Row, closed_row, mixed_row, objectives_for, trace_row
from load_tests.traffic.client import Answer, Ask, Client, Talk, closed_loop, open_loop
from load_tests.traffic.workloads import CLOSED, asks, bursts, mixed, poisson, replay, talks, unlike

MOST_CONCURRENCY, MOST_TRIES = 10_000, 100
ARRIVALS = {"poisson": poisson, "bursts": bursts}


@dataclass(frozen=True)
class Load:
    """One load of a run. `once(client, attempt)` puts it on a peer and returns its figures and the answers."""

    work: str
    name: str
    once: Callable[[Client, int], Awaitable[tuple[Row, list[Answer]]]]


def loads(options: argparse.Namespace, seed: int, most_tokens: int) -> list[Load]:
    """The loads of a round, in their order. `most_tokens`: the longest prompt with answer that the model takes."""
    seconds = options.seconds

    async def mixed_once(rate: float, client: Client, attempt: int) -> tuple[Row, list[Answer]]:
        asked = mixed(rate, seconds, seed, ARRIVALS[options.arrivals])
        answers = await open_loop(client, unlike(asked, attempt))
        return mixed_row(answers, seconds, objectives_for(options.slower)), answers

    async def trace_once(rate: float, client: Client, attempt: int) -> tuple[Row, list[Answer]]:
        answers = await open_loop(client, unlike(replay(options.trace, rate, seconds, most_tokens, seed), attempt))
        return trace_row(answers, seconds), answers

    async def closed_once(concurrency: int, client: Client, attempt: int) -> tuple[Row, list[Answer]]:
        # A seed for each loop and try: a cache may still have the prompts of an earlier one.
        return await loop_once(asks(CLOSED, seed_of(attempt, concurrency)), client, concurrency)

    async def talks_once(concurrency: int, client: Client, attempt: int) -> tuple[Row, list[Answer]]:
        return await loop_once(talks(seed_of(attempt, concurrency)), client, concurrency)

    def seed_of(attempt: int, concurrency: int) -> int:
        return (seed * MOST_TRIES + attempt) * MOST_CONCURRENCY + concurrency

    async def loop_once(source: Iterator[Ask | Talk], client: Client, concurrency: int) -> tuple[Row, list[Answer]]:
        begin_s, end_s = options.closed_seconds / 4, 1.25 * options.closed_seconds
        answers = await closed_loop(client, source.__next__, concurrency, end_s, ramp_s=begin_s)
        return closed_row(answers, begin_s, end_s), answers

    return [
        *(Load("mixed", f"{rate:g}", partial(mixed_once, rate)) for rate in options.rates),
        *(Load("trace", f"{rate:g}", partial(trace_once, rate)) for rate in options.rates if options.trace),
        *(Load("closed", str(number), partial(closed_once, number)) for number in options.concurrency),
        *(Load("talks", str(number), partial(talks_once, number)) for number in options.talks),
    ]
