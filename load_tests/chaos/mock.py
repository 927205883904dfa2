"""A run on the mock cluster: a crowd, faults, and the figures of both."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.schema import BatonConfig
from load_tests.chaos.crowd import Crowd, Question, questions
from load_tests.chaos.faults import Faults
from load_tests.chaos.held import grown, held, leaked
from load_tests.harness.control_plane import InProcess, config, in_process

REPLICAS = tuple(f"{pool}-{number}" for pool in ("prefill", "decode-small", "decode-large") for number in range(4))
QUESTIONS = 300
SCALE, STEP_S, CHUNK_TOKENS, PAUSE_S, HANDOFF_S = 4, 0.05, 256, 0.6, 3.0
WARM_UP_S, WARM_UP_ROUNDS = 8.0, 8
MUST_NOT = ("hung", "wrong", "truncated", "duplicated")
MAY = ("refused", "failed", "cut", "left")


def settings() -> BatonConfig:
    """The mock cluster's configuration."""
    made = config({"step_s": STEP_S, "max_num_batched_tokens": CHUNK_TOKENS}, SCALE, queue_timeout_s=30.0)
    return made.model_copy(update={"channel": made.channel.model_copy(update={"handoff_timeout_s": HANDOFF_S})})


async def run(faults: int, clients: int, streams: int, seed: int) -> dict[str, Any]:
    """Runs it. Returns `mock`, `decode_deaths` and the pauses, as the benchmark prints them."""
    made = settings()
    async with in_process(made, REPLICAS) as cluster:
        asked = await questions(cluster, random.Random(seed), QUESTIONS)
        before = await warm(cluster, asked, clients)
        crowd = Crowd(cluster, asked, random.Random(seed + 1))
        disturber = Faults(cluster, random.Random(seed + 2), PAUSE_S)
        begun_s = time.monotonic()
        disturbing = asyncio.create_task(disturber.run(faults, streams))
        telling = asyncio.create_task(tell(crowd, disturber))
        await crowd.run(clients, disturbing.done)
        await disturbing
        telling.cancel()
        await asyncio.wait([telling])
        took_s = time.monotonic() - begun_s
        more = await leaked(cluster, before)
        try:
            await cluster.settle(wait_s=2 * made.placement.session_timeout_s)
        except AssertionError as error:
            print(error, file=sys.stderr, flush=True)
            more["unsettled"] = 1
    verdicts = Counter(each.verdict() for each in crowd.asked)
    p50, p99 = np.percentile(np.array(disturber.pauses_s() or [0.0]) * 1e3, (50, 99))
    return {
        "mock": {
            "faults": disturber.counts.total(),
            "sessions": len(crowd.asked),
            **{name: verdicts[name] for name in (*MUST_NOT, *MAY)},
            "completed_share": round(verdicts["whole"] / max(1, verdicts["whole"] + verdicts["failed"]), 5),
            "leaked": more,
            "kinds": dict(disturber.counts),
            "points": dict(disturber.points),
            "why_failed": crowd.why_failed(),
            "seconds": round(took_s, 1),
        },
        "decode_deaths": len(disturber.deaths),
        "decode_death_pause_ms_p50": round(float(p50), 1),
        "decode_death_pause_ms_p99": round(float(p99), 1),
    }


async def warm(
    cluster: InProcess, asked: Sequence[Question], clients: int, seconds: float = WARM_UP_S
) -> dict[str, int]:
    """Runs undisturbed load until every pair has made its connections. Returns what the process holds after it.

    `seconds`: the length of a round. Rounds go on until a round ends with no more than the one before it, for at most
    `WARM_UP_ROUNDS` rounds.
    """
    before: dict[str, int] | None = None
    for number in range(WARM_UP_ROUNDS):
        enough = asyncio.create_task(asyncio.sleep(seconds))
        await Crowd(cluster, asked, random.Random(number)).run(clients, enough.done)
        await cluster.settle()
        now = await held(cluster)
        if before is not None and not grown(now, before):
            return before
        before = now
    return now


async def tell(crowd: Crowd, disturber: Faults, every_s: float = 10.0) -> None:
    """Prints the progress every `every_s` seconds, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        print(f"{disturber.counts.total()} faults, {dict(crowd.verdicts)}", file=sys.stderr, flush=True)
