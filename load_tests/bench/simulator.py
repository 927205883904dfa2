"""How far the simulator is from the real cluster: the same small trace to both, on this machine.

`make bench NAME=simulator`, or with `ARGS="--requests 40 --rate 0.3"`. Starts `configs/cpu-1p1d.yaml` (real engines,
real NIXL, one prefill and one decode replica) with every prompt split; with `--split auto`, every way is weighed for
every request. Progress goes to stderr; the last line of stdout is one JSON object. A run takes about six minutes.

**What runs.** First a load that is not compared teaches the session manager what steps take here: `--warm` requests
like those of the trace, at the trace's rate. What it learned (`predictions` in `/baton/status`) is the simulator's
profile. Then the trace runs over HTTP, streamed. Every request is sent at its time and does not wait for those
before it (open loop). Then the same trace runs in the simulator. Prompts are random tokens, so nothing is cached.
Answers have exactly the trace's length.

**What is compared.** TTFT: from sending the request to the first event with a token. TPOT: from that event to the last
one, over the tokens between. Ratios are simulated over real. Targets: medians within 15%, p90 within 25%.
`overhead_s`: what a request spends outside the engines (HTTP, Serve, the session manager). It is the least TTFT of the
first load's requests of one block, less what the profile says of their prefill. Each of the simulator's hops takes half
of it. `modes`: how many of the requests were served in which way.
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
from load_tests.simulator.synthetic import Lengths, poisson
from load_tests.simulator.traces import Trace, TraceRequest

CONFIG = ROOT / "configs" / "cpu-1p1d.yaml"
MODEL = "smollm2-135m-instruct"
PROMPTS, ANSWERS = Lengths(250, 0.6, least=32, most=1000), Lengths(30, 0.5, least=8, most=80)
REQUEST_S = 600.0
PROBE_TOKENS = 32
TARGETS = {"p50": 0.15, "p90": 0.25}
NAMES = Coefficients._fields


@dataclass(frozen=True, slots=True)
class Seen:
    """The times of one answer, in seconds."""

    ttft_s: float
    tpot_s: float


class Client:
    """Sends requests of random tokens and times their answers."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http, self._rng = http, random.Random(seed)

    async def ask(self, prompt_tokens: int, output_tokens: int) -> Seen:
        """One streamed answer of exactly `output_tokens` tokens. Raises SystemExit when it has another length."""
        body = {
            "model": MODEL,
            "prompt": [self._rng.randrange(100, 40_000) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        begun_s, first_s, last_s, tokens = time.perf_counter(), 0.0, 0.0, 0
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                if new := len(choices[0].get("token_ids") or ()):
                    last_s = time.perf_counter()
                    first_s, tokens = first_s or last_s, tokens + new
        if tokens != output_tokens:
            raise SystemExit(f"asked for {output_tokens} tokens, got {tokens}")
        return Seen(first_s - begun_s, (last_s - first_s) / max(1, tokens - 1))

    async def replay(self, trace: Trace) -> list[Seen]:
        """Sends every request at its time."""
        begun_s = time.perf_counter()

        async def one(request: TraceRequest) -> Seen:
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - begun_s)))
            return await self.ask(request.prompt_tokens, request.output_tokens)

        return list(await asyncio.gather(*map(one, trace.requests)))


async def measure(
    url: str, trace: Trace, warm: Trace
) -> tuple[list[Seen], dict[str, Coefficients], float, Counter[str]]:
    """The real answers, the cost of steps by pool, the least TTFT of a prompt within one block, and the modes."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S) as http:
        client = Client(http, seed=trace.requests[0].prompt_tokens)
        probes = [await client.ask(PROBE_TOKENS, 8) for _ in range(6)]
        await client.replay(warm)  # at the trace's own rate: engines that share cores are slower when both are busy
        before = (await http.get("/baton/status")).json()
        steps = before["predictions"]["steps"]
        learned = {pool: Coefficients(*(each[name] for name in NAMES)) for pool, each in steps.items()}
        print(f"learned: {steps}", file=sys.stderr)
        real = await client.replay(trace)
        modes = Counter((await http.get("/baton/status")).json()["modes"]) - Counter(before["modes"])
        return real, learned, min(probe.ttft_s for probe in probes), modes


def simulate(
    trace: Trace, learned: dict[str, Coefficients], overhead_s: float, split: str, seed: int
) -> tuple[list[Seen], Counter[str]]:
    """The same requests in the simulator, and their modes."""
    cluster = cpu_pair(learned["prefill"], learned["decode-main"], hop_s=overhead_s / 2)
    anything = (Objectives("default", ttft_s=REQUEST_S, tpot_s=REQUEST_S),)
    without_objectives: tuple[str, object] = ("classes", {"default": {}})
    options = Options(
        split=split, admission=False, queue_timeout_s=REQUEST_S, seed=seed, placement=(without_objectives,)
    )
    records = Simulation(cluster, trace, anything, options, make_allocator).run().records
    return [Seen(each.ttft_s, each.tpot_s) for each in records], Counter(each.mode for each in records)


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
    trace = poisson(options.rate, options.requests, options.seed, PROMPTS, ANSWERS)
    warm = poisson(options.rate, options.warm, options.seed + 1, PROMPTS, ANSWERS)
    with tempfile.TemporaryDirectory() as directory:
        serve = yaml.safe_load(CONFIG.read_text())
        serve["applications"][0]["args"]["placement"] = {"split": options.split, "queue_timeout_s": REQUEST_S}
        application = Application(serve, Path(directory))
        try:
            application.wait()
            real, learned, probe_s, modes = asyncio.run(measure(application.url, trace, warm))
        finally:
            application.stop()
    overhead_s = max(0.0, probe_s - learned["prefill"].prefill_s(PROBE_TOKENS, 0, 256))
    simulated, simulated_modes = simulate(trace, learned, overhead_s, options.split, options.seed)
    profile = {
        pool: {name: round(value, 9) for name, value in each._asdict().items()} for pool, each in learned.items()
    }
    asked = {name: getattr(options, name) for name in ("requests", "rate", "warm", "split", "seed")}
    return {
        "benchmark": "simulator",
        "conditions": before | asked,
        "profile": profile,
        "overhead_s": round(overhead_s, 4),
        "modes": {"real": modes, "simulated": simulated_modes},
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
