"""Whether anything grows: an hour of steady load with random faults on the mock cluster, its memory sampled.

`make bench NAME=soak`, or with `ARGS="--minutes 10"`. Progress goes to stderr; the last line of stdout is one JSON
object.

**What runs.** The mock cluster, the crowd and the faults of `make bench NAME=chaos`, with fewer clients and about one
fault in two seconds. The load judges each answer and then forgets what it remembers of it.

**What is measured.** Every few seconds, after a garbage collection, a sample is taken. It has the process's resident
memory, the memory that the program has from the C heap and has not given back (`heap_mib`), and the number of Python
objects. The rest of the heap's growth is the allocator's fragmentation. The first third of the samples is warm-up.
`*_growth`: the median of the last third less that of the second. `*_growth_share`: the same as a share of the median of
the second third. `*_per_hour`: the slope of a line through all samples after warm-up. `leaked` is as in `chaos`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from resource import getpagesize
from typing import Any

import numpy as np

from configs.schema import BatonConfig
from load_tests.chaos.crowd import Crowd, questions
from load_tests.chaos.faults import KINDS, Faults
from load_tests.chaos.held import SETTLE_S, leaked
from load_tests.chaos.mock import MAY, MUST_NOT, QUESTIONS, REPLICAS, WARM_UP_S, settings, warm
from load_tests.harness.control_plane import in_process
from load_tests.harness.machine import conditions, heap_bytes

SAMPLES, PAUSE_S = 90, 4.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    rss_mib: float
    heap_mib: float
    objects: int


def sample(began_s: float) -> Sample:
    """The figures of this process now, after a garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    rss_mib = pages * getpagesize() / MIB
    return Sample(time.monotonic() - began_s, rss_mib, heap_bytes() / MIB, len(gc.get_objects()))


def growth(samples: Sequence[Sample], figure: str) -> dict[str, float]:
    """By how much a figure grew after warm-up. The module's docstring defines the results."""
    third = len(samples) // 3
    values = np.array([getattr(each, figure) for each in samples])
    middle, last = np.median(values[third : 2 * third]), np.median(values[2 * third :])
    slope = np.polyfit([each.at_s for each in samples[third:]], values[third:], 1)[0]
    return {
        f"{figure}_start": round(float(values[0]), 1),
        f"{figure}_end": round(float(values[-1]), 1),
        f"{figure}_growth": round(float(last - middle), 1),
        f"{figure}_growth_share": round(float((last - middle) / middle), 4),
        f"{figure}_per_hour": round(float(slope) * 3600, 1),
    }


@dataclass(frozen=True, slots=True)
class Soak:
    """The settings of a run.

    `pause_s`: the longest pause between two faults. `settle_s`: the longest wait at the end for what must be
    given back. `kinds`: the faults that may be drawn.
    """

    seconds: float
    clients: int
    seed: int = 1
    samples: int = SAMPLES
    pause_s: float = PAUSE_S
    warm_up_s: float = WARM_UP_S
    settle_s: float = SETTLE_S
    questions: int = QUESTIONS
    kinds: Sequence[str] = KINDS
    replica_ids: Sequence[str] = REPLICAS
    config: BatonConfig = field(default_factory=settings)


async def run(soak: Soak) -> dict[str, Any]:
    """One run. The module's docstring defines the results."""
    seconds, samples = soak.seconds, soak.samples
    async with in_process(soak.config, soak.replica_ids) as cluster:
        asked = await questions(cluster, random.Random(soak.seed), soak.questions)
        before = await warm(cluster, asked, soak.clients, soak.warm_up_s)
        cluster.answers.clear()
        crowd = Crowd(cluster, asked, random.Random(soak.seed + 1), forgets=True)
        disturber = Faults(cluster, random.Random(soak.seed + 2), soak.pause_s, soak.kinds)
        began_s = time.monotonic()

        def is_over() -> bool:
            return time.monotonic() - began_s > seconds

        async def disturb() -> None:
            while not is_over():
                await disturber.run(1)
                disturber.deaths.clear()

        taken = list[Sample]()
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.run(soak.clients, is_over))
            group.create_task(disturb())
            for number in range(1, samples + 1):
                await asyncio.sleep(max(0.0, began_s + number * seconds / samples - time.monotonic()))
                taken.append(sample(began_s))
                print(taken[-1], f"{disturber.counts.total()} faults", file=sys.stderr, flush=True)
        more = await leaked(cluster, before, soak.settle_s)
    return {
        "minutes": round(seconds / 60, 1),
        "faults": disturber.counts.total(),
        "sessions": crowd.verdicts.total(),
        **{name: crowd.verdicts[name] for name in (*MUST_NOT, *MAY)},
        **growth(taken, "rss_mib"),
        **growth(taken, "heap_mib"),
        **growth(taken, "objects"),
        "leaked": more,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=60, help="sessions in flight")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    before = conditions()
    gc.freeze()  # the objects of the modules do not change, so the collection at each sample can skip them
    result = asyncio.run(run(Soak(60 * options.minutes, options.clients, options.seed)))
    asked = {"clients": options.clients, "seed": options.seed}
    print(json.dumps({"benchmark": "soak", "conditions": before | asked, **result}))


if __name__ == "__main__":
    main()
