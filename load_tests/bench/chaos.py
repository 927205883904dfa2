"""What clients notice when everything fails now and then: faults at random under 200 clients, in one process.

`make bench NAME=chaos`, or with `ARGS="--faults 300"`. Progress goes to stderr; the last line of stdout is one JSON
object.

**What runs.** The session manager, the cluster core, twelve replicas and the KV channel's state machines are the real
ones, without Ray; the engines are mocks (a step takes 20 ms), whose tokens are read from the KV in their blocks. Faults
follow each other in `--streams` streams: an engine is killed, with its KV channel, and replaced within 50 ms; KV writes
fail for up to 50 ms; an engine does nothing for up to 100 ms; a pool refuses calls for up to 50 ms.

**What is measured.** `mock`: `faults` by kind, `sessions`, and what became of them: `hung`, half a minute past their
deadline of one; `wrong`, `truncated` (a clean end too early), `duplicated`; `refused`, an error that the request's own
parameters explain (a seed); `failed`, one that they do not; `left`, the client went away. `completed_share`: of the
sessions that stayed and could go on, those whose answer came whole. `leaked`: what there is more of at the end than at
the start, by kind. `decode_death_pause_ms_*`: from the moment that a decode engine is killed to the next token of each
session on it.

`real` is null: faults on real engines are in `tests/e2e/test_recovery.py`, two of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from load_tests.chaos import Crowd, Faults, questions
from load_tests.control_plane import InProcess, config, in_process
from load_tests.machine import conditions

REPLICAS = tuple(f"{pool}-{number}" for pool in ("prefill", "decode-small", "decode-large") for number in range(4))
QUESTIONS = 300
SCALE, STEP_S, PAUSE_S = 4, 0.02, 0.6
MUST_NOT = ("hung", "wrong", "truncated", "duplicated")


async def run(faults: int, clients: int, streams: int, seed: int) -> dict[str, Any]:
    """One run; see the module."""
    made = config({"step_s": STEP_S}, SCALE, max_attempts=8, queue_timeout_s=30.0)
    async with in_process(made, REPLICAS) as cluster:
        asked = await questions(cluster, random.Random(seed), QUESTIONS)
        await cluster.settle()
        before = held(cluster)
        crowd = Crowd(cluster, asked, random.Random(seed + 1))
        disturber = Faults(cluster, random.Random(seed + 2), PAUSE_S)
        begun_s = time.monotonic()
        disturbing = asyncio.create_task(disturber.run(faults, streams))
        telling = asyncio.create_task(_tell(crowd, disturber))
        await crowd.run(clients, disturbing.done)
        await disturbing
        telling.cancel()
        await asyncio.wait([telling])
        took_s = time.monotonic() - begun_s
        await cluster.settle()
        after = held(cluster)
    verdicts = Counter(each.verdict() for each in crowd.asked)
    p50, p99 = np.percentile(np.array(disturber.pauses_s() or [0.0]) * 1e3, (50, 99))
    return {
        "mock": {
            "faults": dict(disturber.counts),
            "sessions": len(crowd.asked),
            **{name: verdicts[name] for name in (*MUST_NOT, "refused", "failed", "left")},
            "completed_share": round(verdicts["whole"] / max(1, verdicts["whole"] + verdicts["failed"]), 5),
            "leaked": {name: after[name] - before[name] for name in after if after[name] > before[name]},
            "seconds": round(took_s, 1),
        },
        "real": None,
        "decode_deaths": len(disturber.deaths),
        "decode_death_pause_ms_p50": round(float(p50), 1),
        "decode_death_pause_ms_p99": round(float(p99), 1),
    }


def held(cluster: InProcess) -> dict[str, int]:
    """What must not grow. `settle` has seen that no session, promise, block or handoff is left."""
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "shared_memory": len(list(Path("/dev/shm").iterdir())),
        "replicas": len(cluster.replicas),
    }


async def _tell(crowd: Crowd, disturber: Faults) -> None:
    while True:
        await asyncio.sleep(10.0)
        print(f"{disturber.counts.total()} faults, {len(crowd.asked)} sessions", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=200, help="sessions in flight")
    parser.add_argument("--streams", type=int, default=2, help="faults at a time")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    before = conditions()
    result = asyncio.run(run(options.faults, options.clients, options.streams, options.seed))
    asked = {"clients": options.clients, "streams": options.streams, "seed": options.seed}
    print(json.dumps({"benchmark": "chaos", "conditions": before | asked, **result}))


if __name__ == "__main__":
    main()
