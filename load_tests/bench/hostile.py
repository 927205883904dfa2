"""What other clients lose while one client sends what costs much, as fast as it can.

`make bench NAME=hostile`; shorter: `ARGS="--rounds 1 --seconds 5"`. Progress goes to stderr; the last line of stdout is
one JSON object.

**What runs.** One process has the session manager and three replicas with mock engines, a second the ingress as Serve
runs it (uvicorn, the gateway, vLLM's server, a cluster core), behind real HTTP. `--clients` clients with keys of their
own, in this process, each send a short prompt as text, read the streamed answer and send the next. In every second
phase one more client, in a process of its own, sends the requests of `load_tests/hostile/bodies.py` over
`--connections` connections with one key: n = 16,384, lists of 2,048 prompts, cyclic grammars, and bodies of 4 MiB of
several kinds. That process has the lowest priority (`nice 19`): it stands for a client on another machine. Another
client asks `/health` ten times a second, and `/baton/status` once.

**Figures.** `throughput_ratio`: tokens per second that the clients get beside the hostile one, over those without; all
phases of a kind together, the first second of each left out. `errors`: of the clients' requests, those that did not
get the whole answer. `health_ms_p99`: of `/health` in hostile phases; `*_quiet`: without the hostile client.
`probes_failed`: answers of `/health` and `/baton/status` that were no 200. `held_ms`: how long the ingress's event loop
was held at a time; `holds`: how often over 30 ms. `left`: what is open once no request is, by name. `hostile`: what
came of the hostile requests by kind, and the slowest of each in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from configs.schema import BatonConfig
from load_tests.harness.child import Child, child
from load_tests.harness.control_plane.apart import Apart, apart
from load_tests.harness.machine import Stolen, conditions
from load_tests.hostile.bodies import CYCLE
from load_tests.hostile.cluster import MODEL, REPLICAS, settings
from load_tests.traffic.client import Answer, Ask, Client, closed_loop

RAMP_S, PROBE_S, STATUS_EVERY = 1.0, 0.1, 10
OUTPUT_TOKENS = 16
QUIET, HOSTILE = "quiet", "hostile"


class Phase:
    """One phase: what the clients got and what the probe saw."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.health_ms: list[float] = []
        self.status_ms: list[float] = []
        self.probes_failed = 0
        self.tokens_per_s = 0.0


async def one_phase(url: str, clients: int, seconds: float) -> Phase:
    """Run the clients and the probe for some seconds."""
    phase = Phase()

    async def one(number: int) -> None:
        async with Client((url,), MODEL, key=f"client-{number}") as client:
            answers = await closed_loop(client, lambda: _ask(number), 1, RAMP_S + seconds)
        phase.answers += answers
        phase.tokens_per_s += _tokens(answers, seconds) / seconds

    async with asyncio.TaskGroup() as group:
        probing = group.create_task(probe(url, phase))
        loops = [group.create_task(one(number)) for number in range(clients)]
        await asyncio.wait(loops)
        probing.cancel()
    return phase


def _ask(number: int) -> Ask:
    return Ask(0.0, f"Client {number} would like to hear a short story about a fox and a crow.", OUTPUT_TOKENS)


def _tokens(answers: Sequence[Answer], seconds: float) -> int:
    return sum(n for answer in answers for at_s, n in answer.events if RAMP_S <= at_s < RAMP_S + seconds)


async def probe(url: str, phase: Phase) -> None:
    """Ask for health and status until cancelled."""
    timeout = aiohttp.ClientTimeout(total=30.0)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:

        async def look(path: str, taken_ms: list[float]) -> None:
            began_s = time.monotonic()
            try:
                async with http.get(url + path) as response:
                    await response.read()
                    phase.probes_failed += response.status != 200
            except (aiohttp.ClientError, TimeoutError):
                phase.probes_failed += 1
            taken_ms.append((time.monotonic() - began_s) * 1e3)

        number = 0
        while True:
            group.create_task(look("/health", phase.health_ms))
            if number % STATUS_EVERY == 0:
                group.create_task(look("/baton/status", phase.status_ms))
            number += 1
            await asyncio.sleep(PROBE_S)


def run(options: argparse.Namespace, config: BatonConfig | None = None) -> dict[str, Any]:
    """Runs all phases. The module's docstring defines the results."""
    before, stolen = conditions(), Stolen()
    phases: dict[str, list[Phase]] = {QUIET: [], HOSTILE: []}
    held: dict[str, list[dict[str, float]]] = {QUIET: [], HOSTILE: []}
    attacked = Counter[str](), Counter[str]()
    with apart(config or settings(), REPLICAS, CYCLE) as cluster:
        arguments = (cluster.url, MODEL, str(options.connections))
        with child("load_tests.hostile.attack", *arguments, nice=19) as attack:
            asyncio.run(one_phase(cluster.url, options.clients, options.seconds / 4))  # what is first is slower
            cluster.held()
            for number in range(options.rounds):
                for kind in (QUIET, HOSTILE):
                    phase = _phase(kind, cluster, attack, options, attacked)
                    phases[kind].append(phase)
                    found = cluster.held()
                    held[kind].append(found["figures"])
                    _tell(number, kind, phase, found)
        left = cluster.left(options.settle_s)
    return {
        "benchmark": "hostile",
        "conditions": before
        | {"stolen_share": round(stolen.share(), 3)}
        | {name: getattr(options, name) for name in ("clients", "connections", "rounds", "seconds")},
        **_figures(phases),
        "held_ms": {kind: _worst(figures) for kind, figures in held.items()},
        "left": left,
        "hostile": {kind: {"slowest_ms": attacked[1][kind], **_outcomes(attacked[0], kind)} for kind in attacked[1]},
    }


def _phase(
    kind: str, cluster: Apart, attack: Child, options: argparse.Namespace, attacked: tuple[Counter[str], Counter[str]]
) -> Phase:
    if kind == HOSTILE:
        attack.tell({"attack": True})
    phase = asyncio.run(one_phase(cluster.url, options.clients, options.seconds))
    if kind == HOSTILE:
        told = attack.ask({"attack": False})
        for name, outcomes in told["outcomes"].items():
            attacked[0].update({f"{name} {outcome}": count for outcome, count in outcomes.items()})
            attacked[1][name] = max(attacked[1][name], told["slowest_ms"][name])
    return phase


def _outcomes(counts: Counter[str], kind: str) -> dict[str, int]:
    return {name.split()[1]: count for name, count in sorted(counts.items()) if name.split()[0] == kind}


def _worst(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The worst of all phases of a kind; holds are added."""
    worst = {name: max(each[name] for each in figures) for name in ("p50_ms", "p99_ms", "longest_ms")}
    return {name.removesuffix("_ms"): value for name, value in worst.items()} | {
        "holds": sum(each["holds"] for each in figures)
    }


def _figures(phases: dict[str, list[Phase]]) -> dict[str, Any]:
    speed = {kind: [each.tokens_per_s for each in some] for kind, some in phases.items()}
    health = {kind: [ms for each in some for ms in each.health_ms] for kind, some in phases.items()}
    status = [ms for each in phases[HOSTILE] for ms in each.status_ms]
    every = [*phases[QUIET], *phases[HOSTILE]]
    errors = [answer.error for each in every for answer in each.answers if answer.error]
    return {
        "throughput_ratio": round(sum(speed[HOSTILE]) / max(1e-9, sum(speed[QUIET])), 3),
        "tokens_per_s": {kind: [round(each, 1) for each in some] for kind, some in speed.items()},
        "requests": sum(len(each.answers) for each in every),
        "errors": len(errors),
        "why": sorted(set(errors))[:5],
        "health_ms_p99": _p99(health[HOSTILE]),
        "health_ms_p99_quiet": _p99(health[QUIET]),
        "status_ms_p99": _p99(status),
        "probes_failed": sum(each.probes_failed for each in every),
    }


def _p99(values: Sequence[float]) -> float:
    return round(float(np.percentile(np.array(values), 99)), 1)


def _tell(number: int, kind: str, phase: Phase, found: dict[str, Any]) -> None:
    told = f"{phase.tokens_per_s:.1f} tokens/s, /health p99 {_p99(phase.health_ms)} ms, held {found['figures']}"
    print(f"{number} {kind}: {told}", *found["stacks"], sep="\n    ", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20, help="beside the hostile one")
    parser.add_argument("--connections", type=int, default=8, help="of the hostile client")
    parser.add_argument("--rounds", type=int, default=5, help="of a quiet and a hostile phase each")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a phase")
    parser.add_argument("--settle-s", type=float, default=40.0, help="the longest wait for what is left")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    print(json.dumps(run(parse(arguments))), flush=True)


if __name__ == "__main__":
    main()
