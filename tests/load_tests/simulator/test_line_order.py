"""The order of a batch's lines, in virtual time on GPUs that compute prompts and write answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.batches.line_order import in_mixed_order
from app.batches.line_request import LineRequest
from configs.schema import BatonConfig
from deployments.messages import Role
from deployments.policy.allocator import Allocator
from load_tests.simulator.cluster import Options
from load_tests.simulator.metrics import Objectives
from load_tests.simulator.profiles import H100, Cluster, Pool
from load_tests.simulator.simulation import Simulation
from load_tests.simulator.steps import Limits
from load_tests.simulator.synthetic import BLOCK_TOKENS
from load_tests.simulator.traces import Trace, TraceRequest

PROMPTS, ANSWERS = (3000, 200), (40, 600)
pytestmark = pytest.mark.slow


def lines_of(count: int) -> list[LineRequest]:
    """The first half are long prompts with short answers, the others the reverse. No two begin alike."""
    draw, made = random.Random(1), []
    for number in range(count):
        kind = int(number >= count // 2)
        prompt = int(PROMPTS[kind] * draw.lognormvariate(0, 0.3))
        answer = int(ANSWERS[kind] * draw.lognormvariate(0, 0.3))
        made.append(LineRequest(number + 1, str(number), b"{}", draw.randbytes(600), 4 * prompt, answer))
    return made


def seconds(lines: Sequence[LineRequest]) -> float:
    """Until all of them are answered, by two GPUs that run 256 at once each."""
    requests = tuple(
        TraceRequest(0.001 * place, line.prompt_bytes // 4, line.answer_tokens, asked_tokens=line.answer_tokens)
        for place, line in enumerate(lines)
    )
    fleet = Cluster((Pool("main", Role.MIXED, 2, H100, Limits(batched_tokens=2048, sequences=256)),), 131_072)
    options = replace(Options(), queue_timeout_s=1e5, max_queued_requests=10_000, admission=False)

    def allocator(config: BatonConfig, rng: random.Random) -> Allocator:
        return Allocator(config, rng)

    trace, classes = Trace("lines", BLOCK_TOKENS, requests), (Objectives("night", 1e9, 1e9),)
    records = Simulation(fleet, trace, classes, options, allocator).run().records
    return max(each.at_s + each.ttft_s + each.tpot_s * (each.output_tokens - 1) for each in records)


def test_a_mix_of_prompts_and_answers_is_done_before_lines_in_any_order() -> None:
    lines = lines_of(1024)
    any_orders = [seconds(random.Random(seed).sample(lines, len(lines))) for seed in (7, 8, 9)]
    mixed = seconds(in_mixed_order(lines))
    assert mixed < min(any_orders)
    assert mixed < 0.97 * sum(any_orders) / len(any_orders)
