"""Offline tokens per second of an engine in phases and of vLLM's own scheduler, on one and on two pipeline stages.

`make bench NAME=offline`, or smaller: `ARGS="--requests 40 --stages 2 --budgets 128,512 --rounds 1"`. It takes about 20
minutes. Progress goes to stderr; the last line of stdout is one JSON object.

**What runs.** Real engine cores on CPU with the bundled model of 135M parameters in float32, one OpenMP thread for each
stage. For each number of stages there are two engines: one with our scheduler, and one with vLLM's own class. Both have
Baton's connector, the same workers and the same memory. They take turns, and the other one is stopped meanwhile.

**Requests.** All are there at the beginning, and every way gets the same ones. Prompts have 16 to 128 random tokens,
any number as likely. Answers are greedy and do not end by themselves (`ignore_eos`); their lengths are lognormal,
median 24, at most 128. vLLM is told each length; our scheduler knows no more than that none is over 128, and learns,
from the runs before, too. KV memory holds `--kv-tokens` tokens, about half of what as many requests as there are seats
would take.

**Ways.** `default`: vLLM's scheduler with as many tokens a step as its class for offline work takes on CPU (4,096 for
each stage). `tuned`: the same with the best of `--budgets`. `temporal`: phases, also with the best of them. The best is
found in a run of `--searched` requests for each. `auto`: ours, which measures itself, and chooses between phases and
vLLM's way and between steps of three sizes, up to 2,048 tokens (`phases: auto`). What it has found out, it keeps from
run to run; `--learned` runs before the first round do not count.

**What is measured.** The ways take turns in `--rounds` rounds, in another order each; figures are medians.
`output_tokens_per_s`: until nine tenths of all tokens are written, because the last ones are of a few long answers,
which take as long in every way; `whole` has these, too. `bubble_share`: of the stages' time until the last answer, in
which they do not compute: one minus the CPU time that the thread of each worker has spent in steps, without the
exchange of hidden states between stages, in which it spins. `preemptions`: as the engine counts them. `switches`:
changes between steps with prompts alone, answers alone, and both; `mixed_share`: of the steps with prompts, those that
have both. `ratios`: medians of the ratios within each round. `unlike`: of how many requests the answer is another one
than in the first run of `default`, in any round: batches of other sizes round otherwise, and of two tokens that are
about as likely either may come. `default` is compared with itself, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from load_tests.harness.ending import in_a_folder
from load_tests.harness.engines.offline_engines import (
    PHASED,
    PLAIN,
    Asked,
    OfflineEngines,
    configuration,
    default_budget,
)
from load_tests.harness.engines.told_schedulers import CHOOSES
from load_tests.harness.machine import Stolen, conditions
from load_tests.report.offline import Ran, figures, medians, ratios, targets, unlike
from load_tests.simulator.synthetic import Lengths
from load_tests.traffic.workloads import prompt

REQUESTS, SEARCHED, LEARNED, ROUNDS, STAGES = 80, 40, 2, 3, (1, 2)
BUDGETS = (64, 128, 256, 512, 1024)
SEATS, KV_TOKENS = 40, 2048
PROMPT_TOKENS, ANSWERS = (16, 128), Lengths(24, 0.8, least=4, most=128)
OURS = ("temporal", "auto")


@dataclass(frozen=True, slots=True)
class Way:
    """`engine`: which one runs it. `step_tokens`: the most of a step, or `CHOOSES`."""

    engine: str
    step_tokens: int


AUTO = Way(PHASED, CHOOSES)


def requests(count: int, seed: int) -> list[Asked]:
    """The same for every way."""
    rng = random.Random(seed)
    return [Asked(prompt(rng, rng.randint(*PROMPT_TOKENS)), ANSWERS.draw(rng)) for _ in range(count)]


class Bench:
    """One number of stages. `say`: progress."""

    def __init__(self, engines: OfflineEngines, asked: Sequence[Asked], stages: int) -> None:
        self._engines, self._asked, self._stages = engines, asked, stages
        self._reference: tuple[tuple[int, ...], ...] = ()
        self.unlike: dict[str, int] = {}

    async def search(self, engine: str, budgets: Sequence[int], count: int) -> dict[int, float]:
        """Tokens per second of each budget, over the first `count` requests."""
        await self._ran(Way(engine, max(budgets)), self._asked[: count // 4])  # the first run of an engine is slow
        found = {}
        for budget in budgets:
            found[budget] = figures(await self._ran(Way(engine, budget), self._asked[:count]))["output_tokens_per_s"]
            say(f"pp {self._stages} search {engine:8} {budget:5} {found[budget]}")
        return found

    async def learn(self, count: int) -> None:
        """Runs in which our scheduler chooses."""
        for _ in range(count):
            say(f"pp {self._stages} learn {figures(await self._ran(AUTO, self._asked))}")

    async def rounds(self, ways: dict[str, Way], count: int) -> dict[str, dict[str, Any]]:
        """The figures of each way."""
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for turn in range(count):
            for name in in_turn(list(ways), turn):
                ran = await self._ran(ways[name], self._asked)
                self._compare(name, ran)
                rows[name].append(figures(ran))
                say(f"pp {self._stages} round {turn + 1} {name:9} {rows[name][-1]}")
        return {name: medians(each) | {"step_tokens": ways[name].step_tokens} for name, each in rows.items()}

    def _compare(self, name: str, ran: Ran) -> None:
        self._reference = self._reference or ran.answers
        self.unlike[name] = max(self.unlike.get(name, 0), unlike(ran.answers, self._reference))

    async def _ran(self, way: Way, asked: Sequence[Asked]) -> Ran:
        ran = await self._engines.run(way.engine, asked, way.step_tokens, ANSWERS.most)
        if (lengths := [len(tokens) for tokens in ran.answers]) != [each.answer_tokens for each in asked]:
            raise AssertionError(f"{way} gave answers of {lengths} tokens")
        return ran


def in_turn(names: list[str], turn: int) -> list[str]:
    """The first round has the given order, and each later one begins with the next."""
    first = turn % len(names)
    return names[first:] + names[:first]


def best(found: dict[int, float]) -> int:
    """The budget with the most tokens per second."""
    return max(found, key=lambda budget: found[budget])


async def measure(stages: int, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one number of stages. Its engines have ended when this returns or raises."""
    default = default_budget(stages)
    engines = OfflineEngines(configuration(stages, options.kv_tokens, SEATS, max(options.budgets)))
    bench = Bench(engines, requests(options.requests, options.seed), stages)
    try:
        for name in (PLAIN, PHASED):
            say(f"pp {stages} starting {name}")
            await engines.start(name)
        plain = await bench.search(PLAIN, options.budgets, options.searched)
        phased = await bench.search(PHASED, options.budgets, options.searched)
        await bench.learn(options.learned)
        vllm = {"default": Way(PLAIN, default), "tuned": Way(PLAIN, best(plain))}
        rows = await bench.rounds(vllm | {"temporal": Way(PHASED, best(phased)), "auto": AUTO}, options.rounds)
    finally:
        await engines.close()
    searched = {"tuned": plain, "temporal": phased}
    return {**rows, "ratios": ratios(rows, OURS), "searched": searched, "unlike": bench.unlike}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    before, stolen = conditions(), Stolen()
    pp = {str(stages): await measure(stages, options) for stages in options.stages}
    names = ("requests", "searched", "learned", "rounds", "budgets", "kv_tokens", "seed")
    return {
        "benchmark": "offline",
        "pp": pp,
        "targets": {way: targets(pp, way) for way in OURS},
        "conditions": before
        | {name: getattr(options, name) for name in names}
        | {"seats": SEATS, "stolen_share": round(stolen.share(), 4)},
    }


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="load_tests.bench.offline", description="offline work, in phases or not")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each run")
    parser.add_argument("--searched", type=int, default=SEARCHED, help="requests of a run that looks for a budget")
    parser.add_argument("--budgets", type=_numbers, default=list(BUDGETS), help="tokens per step, by comma")
    parser.add_argument("--learned", type=int, default=LEARNED, help="runs in which ours learns which way is fastest")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--stages", type=_numbers, default=list(STAGES), help="of the pipeline, by comma")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="that the KV memory holds")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    began = time.monotonic()
    options = parse(None)
    result = asyncio.run(in_a_folder(lambda _: run(options)))
    result["conditions"]["run_s"] = round(time.monotonic() - began)
    print(json.dumps(result), flush=True)
