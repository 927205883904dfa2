"""Offline work on a pipeline of four stages, in virtual time: phases against hybrid and separate batching.

`make bench NAME=offline_virtual`, or with `ARGS="--requests 500 --machines qwen2.5-32b-l20"`. It takes half an hour.
Progress goes to stderr; the last line of stdout is one JSON object.

**What runs.** vLLM's real scheduler classes over stages that compute nothing (`load_tests/harness/engines/
virtual_pipeline.py`). A step's time is a roofline of its content, by the data sheets of model and accelerator; each
stage takes a fourth of it and passes on in half a millisecond. All requests are there at the beginning; a run ends with
the last answer. Memory for KV is what the data sheet leaves, and 512 requests run at most. Every way gets the same
requests. Prompts are lognormal with a median of 500 tokens; clients ask for 2,048 tokens, and predictors learn in the
run.

**Machines.** `qwen2.5-32b-l20`: Qwen2.5-32B on four L20. `llama-2-13b-l20`: Llama-2-13B, whose KV is large, on four
L20. 45% of the FLOP/s and 75% of the bandwidth are reached, as in `load_tests/simulator/profiles.py`.

**Answers.** `even`: 128 to 384 tokens, any as likely. `chat`: lognormal, median 180. `two_peaks`: of 85% about 100
tokens, of the others about 1,100.

**Ways.** `hybrid_N`: vLLM's scheduler, which computes prompts beside answers, up to N tokens a step. `separate`:
prompts before answers, and never in one step, whenever a prompt has memory. Nothing keeps its batches even: the first
after a prompt has all that is ready then. `separate_even`: the same with our evening, as where each stage's batch has a
queue of its own.
`phased`: ours. `no_greedy`, `no_stealing`, `no_intensity`: ours without one of its methods (`Methods` in
`deployments/policy/temporal/controller.py`). `known_lengths`: ours, told how long each answer will be. `auto`: ours,
which measures itself, and chooses between phases and vLLM's way and between steps of 2,048 and of 512 tokens; what that
costs is in its figures.

**What is measured.** `output_tokens_per_s`: until nine tenths of all tokens are written. The last tenth is of a few
long answers, which take as long in every way; `whole` has it, too. `bubble_share`: of the stages' time until the end,
in which they compute nothing; `preemptions`; `switches` between prefill and decode steps; `steps`. `over`: `phased`
over the best hybrid, over the one with 2,048 tokens a step, the default of vLLM's server on such a GPU, and over the
two of `separate`. `without`: each other way over `phased`. `auto_over`: `auto` over the best hybrid and over `phased`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployments.policy.prediction.step_time import ModelShape, roofline
from deployments.policy.temporal.controller import Controller, EngineShape, Methods, Order, Phase, Sight
from deployments.policy.temporal.lengths import AnswerLengths, Job
from deployments.policy.temporal.memory import Outlook, until
from deployments.step_cost import Coefficients
from load_tests.harness.engines.virtual_pipeline import Asked, Outcome, Shape, run
from load_tests.harness.machine import conditions
from load_tests.simulator.profiles import (
    ACTIVATION_BYTES,
    BANDWIDTH_SHARE,
    FLOPS_SHARE,
    MEMORY_SHARE,
    OVERHEAD_S,
)
from load_tests.simulator.synthetic import Lengths

STAGES, SEATS, BLOCK_TOKENS, HOP_S = 4, 512, 16, 0.0005
BUDGETS, DEFAULT_BUDGET = (512, 2048, 8192), 2048
MOST_TOKENS, MAX_MODEL_LEN = 2048, 8192
COUNTED = 0.9
"""The share of the tokens whose time counts."""
PROMPTS = Lengths(500, 0.8, least=16, most=4096)
ANSWERS: dict[str, Callable[[random.Random], int]] = {
    "even": lambda rng: rng.randint(128, 384),
    "chat": lambda rng: Lengths(180, 0.9, most=MOST_TOKENS).draw(rng),
    "two_peaks": lambda rng: round(rng.gauss(100, 20) if rng.random() < 0.85 else rng.gauss(1100, 100)),
}
METHODS = {
    "phased": Methods(),
    "no_greedy": Methods(greedy=False),
    "no_stealing": Methods(stealing=False),
    "no_intensity": Methods(intensity=False),
    "known_lengths": Methods(),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """One model over `STAGES` accelerators. `steps`: through all stages. `kv_tokens`: that its memory holds."""

    steps: Coefficients
    kv_tokens: int


def _machine(shape: ModelShape, flops_per_s: float, bytes_per_s: float, memory_bytes: float) -> Machine:
    truth = replace(
        roofline(shape, ""),
        flops_per_s=flops_per_s * FLOPS_SHARE,
        bytes_per_s=bytes_per_s * BANDWIDTH_SHARE,
        overhead_s=OVERHEAD_S * STAGES,
    )
    kv_bytes = STAGES * (memory_bytes * MEMORY_SHARE - ACTIVATION_BYTES) - truth.weight_bytes
    return Machine(truth.coefficients(), int(kv_bytes / truth.kv_bytes_per_token))


QWEN_32B = ModelShape(layers=64, hidden=5120, intermediate=27648, heads=40, kv_heads=8, head_dim=128, vocab=152064)
LLAMA_13B = ModelShape(layers=40, hidden=5120, intermediate=13824, heads=40, kv_heads=40, head_dim=128, vocab=32000)
L20 = 119.5e12, 864e9, 48e9
"""NVIDIA's data sheet: dense bfloat16 FLOP/s, bytes/s, bytes."""
MACHINES = {"qwen2.5-32b-l20": _machine(QWEN_32B, *L20), "llama-2-13b-l20": _machine(LLAMA_13B, *L20)}


class PrefillFirst(Controller):
    """Separate batching: prompts before answers, whenever one has memory (all but 1% of it may be held)."""

    def decide(self, sight: Sight) -> Order:
        begins = self._admitted(sight)
        if sight.prefilling or (begins and not sight.blocked) or not sight.live:
            return Order(Phase.PREFILL, begins or int(not sight.live))
        return Order(Phase.DECODE)


class KnownLengths(AnswerLengths):
    """Knows each answer's length."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        super().__init__()
        self._tokens = {each.name: each.output_tokens for each in asked}

    def left(self, job: Job, written: int) -> int:
        return max(self._tokens[job.key] - written, 1)

    def outlook(self, job: Job, written: int) -> Outlook:
        return until(self.left(job, written))


def requests(answers: str, count: int, seed: int) -> list[Asked]:
    """`count` requests; the same for every way."""
    rng = random.Random(seed)
    drawn = [(PROMPTS.draw(rng), max(1, min(ANSWERS[answers](rng), MOST_TOKENS))) for _ in range(count)]
    return [Asked(f"r{number}", prompt, answer, MOST_TOKENS) for number, (prompt, answer) in enumerate(drawn)]


def run_way(way: str, machine: Machine, asked: Sequence[Asked]) -> Outcome:
    """All requests in one way."""
    kind, _, budget = way.partition("_")
    tokens = int(budget) if kind == "hybrid" else DEFAULT_BUDGET
    shape = Shape(STAGES, tokens, SEATS, machine.kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS, MAX_MODEL_LEN)
    if kind == "hybrid":
        return run("default", shape, asked, machine.steps, HOP_S)
    engine = EngineShape(STAGES, tokens, SEATS, shape.blocks - 1, BLOCK_TOKENS)
    if kind == "auto":
        return run("choosing", shape, asked, machine.steps, HOP_S, Controller(engine, machine.steps))
    if kind == "separate":
        methods = Methods(greedy=False, stealing=way == "separate_even", memory_share=0.99)
        controller: Controller = PrefillFirst(engine, machine.steps, methods=methods)
    else:
        lengths = KnownLengths(asked) if way == "known_lengths" else None
        controller = Controller(engine, machine.steps, methods=METHODS[way], lengths=lengths)
    return run("phased", shape, asked, machine.steps, HOP_S, controller)


WAYS = (*(f"hybrid_{budget}" for budget in BUDGETS), "separate", "separate_even", *METHODS, "auto")


def figures(outcome: Outcome) -> dict[str, Any]:
    """What one run was."""
    tokens = sum(outcome.tokens.values())
    return {
        "output_tokens_per_s": round(COUNTED * tokens / outcome.seconds_until(COUNTED), 1),
        "whole": round(tokens / outcome.seconds, 1),
        "bubble_share": round(1.0 - outcome.busy_s / STAGES / outcome.seconds, 4),
        "preemptions": outcome.preemptions,
        "switches": outcome.switches,
        "steps": len(outcome.step_kinds),
        "seconds": round(outcome.seconds, 1),
    }


def compared(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`phased` over the others, and the others over it."""
    rate = {way: float(row["output_tokens_per_s"]) for way, row in rows.items()}
    best = max((way for way in rate if way.startswith("hybrid")), key=lambda way: rate[way])
    over = {
        "best": best,
        "default": f"hybrid_{DEFAULT_BUDGET}",
        "separate": "separate",
        "separate_even": "separate_even",
    }
    ratios = {name: round(rate["phased"] / rate[way], 4) for name, way in over.items()}
    without = {way: round(rate[way] / rate["phased"], 4) for way in METHODS if way != "phased"}
    auto = {way: round(rate["auto"] / rate[other], 4) for way, other in (("best", best), ("phased", "phased"))}
    return {"best_hybrid": best, "over": ratios, "without": without, "auto_over": auto}


def measure(machine: Machine, answers: str, count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Every way with the requests of one distribution."""
    asked, rows = requests(answers, count, seed), {}
    for way in WAYS:
        begun_s = time.monotonic()
        rows[way] = figures(run_way(way, machine, asked))
        say(f"{answers:10} {way:14} {rows[way]}  ({time.monotonic() - begun_s:.0f} s)")
    return {"ways": rows, **compared(rows)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--machines", default=",".join(MACHINES), help="by comma")
    parser.add_argument("--answers", default=",".join(ANSWERS), help="by comma")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    before, found = conditions(), dict[str, Any]()
    for name in options.machines.split(","):
        machine = MACHINES[name]

        def say(text: str, name: str = name) -> None:
            print(f"{name:16} {text}", file=sys.stderr, flush=True)

        found[name] = {
            answers: measure(machine, answers, options.requests, options.seed, say)
            for answers in options.answers.split(",")
        }
        found[name]["kv_tokens"] = machine.kv_tokens
    asked = {"requests": options.requests, "seed": options.seed, "stages": STAGES, "seats": SEATS, "hop_s": HOP_S}
    print(json.dumps({"benchmark": "offline_virtual", "conditions": before | asked, "machines": found}))


if __name__ == "__main__":
    main()
