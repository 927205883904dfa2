"""How far the simulator is from the real cluster: the same small trace to both, on this machine.

`make bench NAME=simulator`, or with `ARGS="--requests 40 --rate 0.3"`. Starts `configs/cpu-1p1d.yaml` (real engines,
real NIXL, one prefill and one decode replica) with every prompt split. With `--split auto`, every way is weighed for
every request, and the trace has work for each of them: prompts and answers of unlike lengths, and later turns, which
repeat an earlier prompt. Progress goes to stderr; the last line of stdout is one JSON object. A run takes about six
minutes, with `--split auto` and twice the requests about ten.

**What runs.** First a load that is not compared teaches the session manager what steps take here: `--warm` requests
like those of the trace, at the trace's rate. What it learned (`predictions` in `/baton/status`) is the simulator's
profile. Then the trace runs over HTTP, streamed. Every request is sent at its time and does not wait for those
before it (open loop). Then the same trace runs in the simulator. Prompts are random tokens; only a later turn finds
some of its own in a cache. Answers have exactly the trace's length.

**What is compared.** TTFT: from sending the request to the first event with a token. TPOT: from that event to the last
one, over the tokens between. Ratios are simulated over real. Targets: medians within 15%, p90 within 25%.
`overhead_s`: what a request spends outside the engines (HTTP, Serve, the session manager). It is the least TTFT of the
first load's requests of one block, less what the profile says of their prefill. Each of the simulator's hops takes half
of it. `ways`: how many of the requests were served in which way. `split`: prefill then decode. `on decode`, `on
prefill`: all on that replica. `, cached`: the replica that computed the prompt, or a part of it, had its beginning in
its cache. `moved`: placed twice before the first token. A later move does not show on the real side; the simulated one
calls it `split`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from deployments.step_cost import Coefficients
from load_tests.harness.application import ROOT, Application
from load_tests.harness.machine import conditions
from load_tests.simulator.cluster import Options
from load_tests.simulator.experiment import make_allocator
from load_tests.simulator.metrics import Objectives
from load_tests.simulator.profiles import cpu_pair
from load_tests.simulator.simulation import Simulation
from load_tests.simulator.synthetic import BLOCK_TOKENS, Lengths, poisson
from load_tests.simulator.traces import Trace, TraceRequest

CONFIG = ROOT / "configs" / "cpu-1p1d.yaml"
MODEL = "smollm2-135m-instruct"
PROMPTS, ANSWERS = Lengths(250, 0.6, least=32, most=1000), Lengths(30, 0.5, least=8, most=80)
ADDED, LONGEST, PAUSE_S = Lengths(100, 0.6, least=16, most=400), 1200, 8.0
"""What a later turn adds to its prompt; a prompt that gets no further turn; the least time between two turns."""
SPELLS = (
    (PROMPTS, Lengths(4, 0.5, least=2, most=8)),
    (Lengths(60, 0.5, least=16, most=128), Lengths(60, 0.5, least=24, most=160)),
)
SPELL = 12
"""Prompts and answers of the two kinds of spells, and how many requests one has."""
REQUEST_S = 600.0
PROBE_TOKENS = 32
TARGETS = {"p50": 0.15, "p90": 0.25}
NAMES = Coefficients._fields


@dataclass(frozen=True, slots=True)
class Seen:
    """The times of one answer, in seconds, and the way in which it was served."""

    ttft_s: float
    tpot_s: float
    way: str = ""


class Client:
    """Sends requests of random tokens and times their answers."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http, self._rng = http, random.Random(seed)

    async def ask(self, request: TraceRequest) -> Seen:
        """One streamed answer of exactly the request's length. Raises SystemExit when it has another length.

        Blocks with the same hash have the same tokens.
        """
        output_tokens = request.output_tokens
        prompt = [token for block in request.hashes for token in _tokens(random.Random(block), BLOCK_TOKENS)]
        body = {
            "model": MODEL,
            "prompt": prompt + _tokens(self._rng, request.prompt_tokens - len(prompt)),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        begun_s, first_s, last_s, tokens, cached = time.perf_counter(), 0.0, 0.0, 0, 0
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            mode = response.headers.get("x-baton-mode", "")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                cached = max(cached, details.get("cached_tokens") or 0)
                choices = event.get("choices") or [{}]
                if new := len(choices[0].get("token_ids") or ()):
                    last_s = time.perf_counter()
                    first_s, tokens = first_s or last_s, tokens + new
        if tokens != output_tokens:
            raise SystemExit(f"asked for {output_tokens} tokens, got {tokens}")
        return Seen(first_s - begun_s, (last_s - first_s) / max(1, tokens - 1), way_of(mode, cached))

    async def replay(self, trace: Trace) -> list[Seen]:
        """Sends every request at its time."""
        begun_s = time.perf_counter()

        async def one(request: TraceRequest) -> Seen:
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - begun_s)))
            return await self.ask(request)

        return list(await asyncio.gather(*map(one, trace.requests)))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(count)]


def way_of(mode: str, cached: float) -> str:
    """The way in which a request was served. `mode`: as the response's header has it; of all placements, by comma."""
    words = {"disaggregated": "split", "decode_local": "on decode", "prefill_local": "on prefill"}
    way = words.get(mode, "moved" if "," in mode else mode)
    return f"{way}, cached" if cached else way


def every_way(requests_per_s: float, count: int, seed: int, first_talk: int = 0) -> Trace:
    """Requests of which each way serves some: half are later turns, which repeat an earlier prompt and add to it.

    A later turn comes at least `PAUSE_S` after the turn before. Spells of `SPELL` requests with short answers and of
    short prompts with long answers take turns.
    """
    rng = random.Random(seed)
    at_s, requests, last = 0.0, list[TraceRequest](), dict[int, TraceRequest]()
    for index in range(count):
        at_s += rng.expovariate(requests_per_s)
        rested = [talk for talk, turn in last.items() if turn.at_s + PAUSE_S < at_s and turn.prompt_tokens < LONGEST]
        talk = rng.choice(rested) if rested and rng.random() < 0.5 else first_talk + index
        earlier = last.pop(talk, None)
        new, answers = SPELLS[index // SPELL % len(SPELLS)]
        prompt = new.draw(rng) if earlier is None else earlier.prompt_tokens + ADDED.draw(rng)
        known = () if earlier is None else earlier.hashes
        own = ((talk + 1) << 16) + (len(requests) << 6)
        fresh = range(own, own + prompt // BLOCK_TOKENS - len(known))
        last[talk] = TraceRequest(at_s, prompt, answers.draw(rng), (*known, *fresh))
        requests.append(last[talk])
    return Trace("every_way", BLOCK_TOKENS, tuple(requests))


async def measure(url: str, trace: Trace, warm: Trace) -> tuple[list[Seen], dict[str, Coefficients], float]:
    """The real answers, the cost of steps by pool, and the least TTFT of a prompt within one block."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S) as http:
        client = Client(http, seed=trace.requests[0].prompt_tokens)
        probes = [await client.ask(TraceRequest(0.0, PROBE_TOKENS, 8)) for _ in range(6)]
        await client.replay(warm)  # at the trace's own rate: engines that share cores are slower when both are busy
        steps = (await http.get("/baton/status")).json()["predictions"]["steps"]
        learned = {pool: Coefficients(*(each[name] for name in NAMES)) for pool, each in steps.items()}
        print(f"learned: {steps}", file=sys.stderr)
        return await client.replay(trace), learned, min(probe.ttft_s for probe in probes)


def simulate(trace: Trace, learned: dict[str, Coefficients], overhead_s: float, split: str, seed: int) -> list[Seen]:
    """The same requests in the simulator."""
    cluster = cpu_pair(learned["prefill"], learned["decode-main"], hop_s=overhead_s / 2)
    anything = (Objectives("default", ttft_s=REQUEST_S, tpot_s=REQUEST_S),)
    without_objectives: tuple[str, object] = ("classes", {"default": {}})
    options = Options(
        split=split, admission=False, queue_timeout_s=REQUEST_S, seed=seed, placement=(without_objectives,)
    )
    records = Simulation(cluster, trace, anything, options, make_allocator).run().records
    return [Seen(each.ttft_s, each.tpot_s, way_of(each.mode, each.cached_blocks)) for each in records]


def compare(real: Sequence[Seen], simulated: Sequence[Seen]) -> dict[str, Any]:
    """Percentiles of both, their ratios, and whether the ratios are within the targets."""
    figures: dict[str, Any] = {}
    for name in ("ttft_s", "tpot_s"):
        for level, within in TARGETS.items():
            percent = float(level.removeprefix("p"))
            a, b = (float(np.percentile([getattr(each, name) for each in side], percent)) for side in (real, simulated))
            figures[f"{name}_{level}"] = {
                "real": round(a, 4),
                "simulated": round(b, 4),
                "ratio": round(b / a, 3),
                "met": abs(b / a - 1) <= within,
            }
    return figures


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the trace on the real cluster, then in the simulator."""
    before = conditions()
    if options.split == "always":
        trace = poisson(options.rate, options.requests, options.seed, PROMPTS, ANSWERS)
        warm = poisson(options.rate, options.warm, options.seed + 1, PROMPTS, ANSWERS)
    else:
        trace = every_way(options.rate, options.requests, options.seed)
        warm = every_way(options.rate, options.warm, options.seed + 1, first_talk=options.requests)
    with tempfile.TemporaryDirectory() as directory:
        serve = yaml.safe_load(CONFIG.read_text())
        serve["applications"][0]["args"]["placement"] = {"split": options.split, "queue_timeout_s": REQUEST_S}
        application = Application(serve, Path(directory))
        try:
            application.wait()
            real, learned, probe_s = asyncio.run(measure(application.url, trace, warm))
        finally:
            application.stop()
    overhead_s = max(0.0, probe_s - learned["prefill"].prefill_s(PROBE_TOKENS, 0, 256))
    simulated = simulate(trace, learned, overhead_s, options.split, options.seed)
    profile = {
        pool: {name: round(value, 9) for name, value in each._asdict().items()} for pool, each in learned.items()
    }
    both = {"real": real, "simulated": simulated}
    asked = {name: getattr(options, name) for name in ("requests", "rate", "warm", "split", "seed")}
    return {
        "benchmark": "simulator",
        "conditions": before | asked,
        "profile": profile,
        "overhead_s": round(overhead_s, 4),
        "ways": {name: Counter(each.way for each in side) for name, side in both.items()},
        **compare(real, simulated),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="requests that are compared")
    parser.add_argument("--rate", type=float, default=0.25, help="requests per second")
    parser.add_argument("--warm", type=int, default=36, help="requests before them, to learn from")
    parser.add_argument("--split", choices=("always", "auto"), default="always")
    parser.add_argument("--seed", type=int, default=1)
    print(json.dumps(run(parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
