"""What hostile but valid requests do to the server: errors, hangs and leaks.

`make bench NAME=fuzz`, or with `ARGS="--cases 2000 --real-cases 1000"`. Progress and every fault go to stderr; the last
line of stdout is one JSON object. `python -m load_tests.fuzz SEED NUMBER` prints a case again.

**What runs.** `load_tests/fuzz` makes bodies for the eight routes that take one, by a seed: values at their bounds and
just over them, deep and recursive schemas and grammars, many answers, odd text, large bodies. One in eight has a field
taken away or replaced. Three in a hundred requests have another method, path or body, and three in a hundred clients
leave. `mock`: the real ingress application (the gateway, vLLM's server, a cluster core) over the real control plane
with mock engines, in this process. `real`: `configs/cpu.yaml` as `make serve` starts it, asked over HTTP; with
`--examples` schemathesis asks it as well, by its OpenAPI document (`document`).

**What is measured.** `cases`. `status_5xx`: answers with such a status or, in a stream, such an error; 503 with
`no_replica_available` counts as `no_capacity` where a pool has no ready replica, and as a 5xx otherwise. `hung`: no
answer within two minutes (`real`: five). `malformed`: neither an answer nor an error in the API's shape. `broken`: the
connection broke. `left`: the client left. `leaked`: what there is more of at the end than after the warm-up, by name:
sessions, promises, blocks, tasks, threads and descriptors. The figures at the top add both runs; there `leaked` is the
number of such names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from load_tests.fuzz import mock, real
from load_tests.fuzz.run import FAULTS
from load_tests.harness.machine import conditions


def total(runs: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The figures of all runs together."""
    figures = {name: sum(run[name] for run in runs) for name in ("cases", *FAULTS)}
    return {**figures, "leaked": sum(len(run["leaked"]) for run in runs)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="over mock engines; 0: leave them out")
    parser.add_argument("--real-cases", type=int, default=0, help="over real engines; 0: leave them out")
    parser.add_argument(
        "--examples", type=int, default=0, help="of each operation by schemathesis, over real engines, too"
    )
    parser.add_argument("--clients", type=int, default=mock.CLIENTS, help="cases in flight")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    before = conditions()
    logging.disable(logging.ERROR)  # vLLM's server logs a traceback for many a refusal
    runs: dict[str, dict[str, Any]] = {}
    if options.cases:
        runs["mock"] = asyncio.run(mock.run(options.cases, options.seed, options.clients))
    if options.real_cases:
        runs["real"] = real.run(options.real_cases, options.seed, options.clients, document_examples=options.examples)
    asked = {"clients": options.clients, "seed": options.seed, "engines": list(runs)}
    print(json.dumps({"benchmark": "fuzz", "conditions": before | asked, **total(list(runs.values())), **runs}))


if __name__ == "__main__":
    main()
