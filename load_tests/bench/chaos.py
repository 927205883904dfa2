"""What clients notice when everything fails now and then: faults at random under a crowd of clients.

`make bench NAME=chaos`, or with `ARGS="--faults 300 --real-faults 0"`. Progress goes to stderr; the last line of
stdout is one JSON object. The mock takes half an hour, and `real` about 20 minutes more.

**What runs: `mock`.** There are 200 clients. The session manager, the cluster core, twelve replicas and the KV
channel's state machines are the real ones, in one process without Ray. The engines are mocks: a step takes 50 ms, and
they read their tokens from the KV in their blocks. Faults follow each other in `--streams` streams. The kind of each is
drawn, and so is the point of a session's life at which it happens (`load_tests/chaos/points.py`):

- an engine is killed, with its KV channel, and replaced within 50 ms;
- KV writes fail for up to 50 ms;
- an engine stops for up to 200 ms, while its writes stay under way;
- an engine is slowed down to a multiple for up to 300 ms;
- an engine has no free blocks for up to 100 ms;
- a pool refuses calls for up to 50 ms;
- half of what a worker sends to its peers for up to 100 ms is dropped, delayed by up to 100 ms, sent twice or changed
  by one bit.

One fault in fifty kills the session manager, for up to 300 ms, or the ingress.

**What runs: `real`.** `configs/cpu.yaml` as `make serve` starts it, with fetches, KV tiers and a small memory of
prefill, and with a few clients over HTTP: `load_tests/chaos/real.py`.

**What is measured.** `faults`, `sessions`, and the outcomes of the sessions. `hung`: one without an end half a minute
past its deadline of one minute. `wrong`: the answer is another one. `truncated`: a clean end too early. `duplicated`:
tokens came twice. `refused`: an error that the request's own parameters explain (a seed). `failed`: an error that they
do not explain. `away`: no session manager was there. `cut`: the ingress died. `left`: the client left.
`caches`, of `real`: KV blocks that replicas had fetched and loaded at the end, and what broke of it.
`completed_share`: of the sessions that stayed, were not cut and could go on, those whose answer came whole. `leaked`:
what there is more of at the end than at the start, by kind. `decode_death_pause_ms_*`, of the mock: the longest gap
between two tokens around the death of a decode engine, of each session that was decoding there. Other faults that
hit the session in that gap count in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from load_tests.chaos import mock, real
from load_tests.harness.machine import conditions


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000, help="on the mock cluster; 0: leave it out")
    parser.add_argument("--real-faults", type=int, default=40, help="on real engines; 0: leave them out")
    parser.add_argument("--clients", type=int, default=200, help="sessions in flight on the mock cluster")
    parser.add_argument("--streams", type=int, default=4, help="faults at a time on the mock cluster")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    before = conditions()
    result: dict[str, Any] = {"mock": None, "real": None}
    if options.faults:
        result |= asyncio.run(mock.run(options.faults, options.clients, options.streams, options.seed))
    if options.real_faults:
        result |= {"real": real.run(options.real_faults, options.seed)}
    asked = {"clients": options.clients, "streams": options.streams, "seed": options.seed}
    print(json.dumps({"benchmark": "chaos", "conditions": before | asked, **result}))


if __name__ == "__main__":
    main()
