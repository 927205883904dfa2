"""Lines of a batch beside an online trace, on the simulator's GPUs: what the trace loses, and what the lines get.

`make bench NAME=lines`, about five minutes; `--quick` half a minute. Progress goes to stderr; the last line of stdout
is one JSON object.

**What runs.** The real allocator over simulated replicas (`load_tests/simulator/profiles.py`), each with a tier of
200 GB. `alone_per_s`: what the fleet answers of the trace and of lines where nothing else comes. Of lines: when all
come at once. Of the trace: at the fastest pace at which 99% are within both objectives; the paces that are tried are
parts of `at_once_per_s`, what the fleet answers when all come at once and nothing is promised. Then the trace runs at
`--share` of its own pace, twice: alone, and with lines that are there from the beginning and never run out. Lines have
the class that yields. A class is told by its prompts' length here, so a line has more prompt tokens than any request of
the trace; the few longer ones of the trace are left out (`left_out`).

**What is measured**, of what comes or ends in the second half of the time. `attainment`: the share of the trace's
requests within both objectives. `ratio`: latencies beside lines over those without. `lines_per_s`; `of_idle`: that over
`alone_per_s` of lines times the share of the fleet that the trace leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from load_tests.harness.machine import conditions
from load_tests.simulator import synthetic
from load_tests.simulator.cluster import Options
from load_tests.simulator.experiment import load_trace, make_allocator
from load_tests.simulator.metrics import Classes, Objectives, Record, summarise
from load_tests.simulator.profiles import Cluster, heterogeneous
from load_tests.simulator.simulation import Simulation
from load_tests.simulator.traces import Trace, TraceError, TraceRequest

PROMPT, ANSWER = 4096, 300
ONLINE = Objectives("chat", ttft_s=2.0, tpot_s=0.05, most_prompt_tokens=PROMPT - 1)
BESIDE: Classes = (ONLINE, Objectives("batch", 1e9, 1e9, yields=True))
UNPROMISED: Classes = (replace(ONLINE, ttft_s=1e9, tpot_s=1e9), replace(BESIDE[1], yields=False))
TIER_BYTES = 200e9
EARLY, LATE = 0.1, 0.8
"""Of requests that come at once, the parts that are answered before and after a fleet's rate is taken."""
WITHIN = 0.99
"""Of a trace's requests, the share that a fleet answers within both objectives at a pace that it keeps up with."""
PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LATENCIES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark. Raises TraceError when the trace cannot be read."""
    before = conditions()
    whole = load_trace(options.trace, _fleet(options).max_model_len)
    trace = replace(whole, requests=tuple(each for each in whole.requests if each.prompt_tokens < PROMPT))
    at_once_per_s = _all_at_once(options, trace.scaled(1e6, options.alone).requests)
    alone = {"online": _within_objectives(options, trace, at_once_per_s)}
    alone["lines"] = _all_at_once(options, synthetic.lines(options.alone, PROMPT, ANSWER))
    rate = options.share * alone["online"]
    online = trace.scaled(rate, round(rate * options.seconds)).requests
    lines = synthetic.lines(round(alone["lines"] * options.seconds), PROMPT, ANSWER)
    rows = {"without": _row(options, online, ()), "beside": _row(options, online, lines)}
    idle = (1.0 - options.share) * alone["lines"]
    return {
        "trace": options.trace,
        "requests_per_s": round(rate, 1),
        "left_out": len(whole.requests) - len(trace.requests),
        "at_once_per_s": round(at_once_per_s, 1),
        "alone_per_s": {name: round(value, 1) for name, value in alone.items()},
        **rows,
        "ratio": {name: round(rows["beside"][name] / rows["without"][name], 3) for name in LATENCIES},
        "of_idle": round(rows["beside"]["lines_per_s"] / idle, 3),
        "objectives": asdict(ONLINE),
        "line": {"prompt_tokens": PROMPT, "output_tokens": ANSWER},
        "conditions": before
        | {"replicas": options.replicas, "prefill": options.prefill, "seconds": options.seconds, "seed": options.seed},
    }


def _row(options: argparse.Namespace, online: Sequence[TraceRequest], lines: Sequence[TraceRequest]) -> dict[str, Any]:
    records = _simulate(options, (*online, *lines), BESIDE)
    found = _of_trace(records)
    from_s, until_s = found["warmup_s"], online[-1].at_s
    ends = [each.end_s for each in records if each.prompt_tokens == PROMPT and not each.refused]
    row = {
        "attainment": round(found["goodput"] / found["offered"], 4),
        **{name: found[name] for name in ("refused", *LATENCIES)},
        "lines_per_s": round(sum(from_s <= end_s <= until_s for end_s in ends) / (until_s - from_s), 2),
    }
    print(f"{'beside' if lines else 'without'} lines: {row}", file=sys.stderr, flush=True)
    return row


def _of_trace(records: Sequence[Record]) -> dict[str, Any]:
    return summarise([each for each in records if each.prompt_tokens < PROMPT], BESIDE)


def _within_objectives(options: argparse.Namespace, trace: Trace, at_once_per_s: float) -> float:
    """The fastest of some paces of the trace, in requests per second, at which the fleet keeps both objectives."""
    for part in PARTS:
        rate = part * at_once_per_s
        found = _of_trace(_simulate(options, trace.scaled(rate, round(rate * options.seconds)).requests, BESIDE))
        print(f"at {rate:.0f} a second: {found['goodput'] / found['offered']:.3f}", file=sys.stderr, flush=True)
        if found["goodput"] >= WITHIN * found["offered"]:
            return rate
    raise TraceError(f"the objectives are not kept at {PARTS[-1]:g} of what comes at once")


def _all_at_once(options: argparse.Namespace, requests: Iterable[TraceRequest]) -> float:
    """The requests that the fleet answers in a second when it has all of them from the beginning."""
    ends = sorted(each.end_s for each in _simulate(options, [replace(each, at_s=0.0) for each in requests], UNPROMISED))
    early, late = (round(part * len(ends)) for part in (EARLY, LATE))
    return (late - early) / (ends[late] - ends[early])


def _simulate(options: argparse.Namespace, requests: Iterable[TraceRequest], classes: Classes) -> Sequence[Record]:
    """The records of these requests."""
    ordered = tuple(sorted(requests, key=lambda request: request.at_s))
    settings = replace(Options(), queue_timeout_s=1e5, max_queued_requests=10**6, seed=options.seed)
    trace = Trace("both", synthetic.BLOCK_TOKENS, ordered)
    return Simulation(_fleet(options), trace, classes, settings, make_allocator).run().records


def _fleet(options: argparse.Namespace) -> Cluster:
    return heterogeneous(options.replicas, prefill=options.prefill, tier_bytes=TIER_BYTES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures as one JSON object."""
    parser = argparse.ArgumentParser(prog="load_tests.bench.lines", description="a batch beside a trace, simulated")
    parser.add_argument("--quick", action="store_true", help="a few seconds of a small fleet")
    parser.add_argument("--trace", default="azure", help="a file's beginning, or a made trace")
    parser.add_argument("--share", type=float, default=0.5, help="of what the fleet answers within its objectives")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--prefill", type=int, help="so many of the replicas prefill; default: 11 of 16")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the trace; the second half counts")
    parser.add_argument("--alone", type=int, default=4000, help="requests that come at once, to see what is answered")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.replicas, options.seconds, options.alone = 6, 16.0, 800
    print(json.dumps(run(options)))


if __name__ == "__main__":
    try:
        main()
    except TraceError as error:
        sys.exit(str(error))
