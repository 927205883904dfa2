"""Work that yields, beside online traffic in virtual time: what the traffic loses, and what the work gets."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from configs.schema import BatonConfig
from deployments.policy.allocator import Allocator
from load_tests.simulator import synthetic
from load_tests.simulator.cluster import Options
from load_tests.simulator.metrics import Classes, Objectives, Record
from load_tests.simulator.profiles import heterogeneous
from load_tests.simulator.simulation import Simulation
from load_tests.simulator.traces import Trace, TraceRequest

CHAT = Objectives("chat", ttft_s=2.0, tpot_s=0.05, most_prompt_tokens=1000)
YIELDING: Classes = (CHAT, Objectives("night", 1e9, 1e9, yields=True))
PLAIN: Classes = (CHAT, Objectives("night", 1e9, 1e9))
SHORT = synthetic.Lengths(400, 0.8, least=16, most=1000)
pytestmark = pytest.mark.slow
LINE = TraceRequest(0.0, 2000, 300)


def allocator(config: BatonConfig, rng: random.Random) -> Allocator:
    return Allocator(config, rng)


def run(lines: int, classes: Classes) -> tuple[list[Record], list[Record]]:
    """The records of the traffic, and those of the lines, which all come in the middle of it."""
    traffic = synthetic.poisson(20.0, 1200, seed=3, prompts=SHORT)
    middle_s = traffic.requests[300].at_s
    flood = [replace(LINE, at_s=middle_s + 0.001 * number) for number in range(lines)]
    requests = sorted((*traffic.requests, *flood), key=lambda request: request.at_s)
    options = replace(Options(), queue_timeout_s=1e5, max_queued_requests=10_000)
    result = Simulation(
        heterogeneous(6), Trace("both", traffic.block_tokens, tuple(requests)), classes, options, allocator
    ).run()
    assert result.blocks_in_use == 0
    assert result.preemptions == 0
    is_line = [record.prompt_tokens > 1000 for record in result.records]
    split = [[each for each, of in zip(result.records, is_line, strict=True) if of is which] for which in (False, True)]
    return split[0], split[1]


def p99_ttft_s(records: list[Record]) -> float:
    """Of those that were served."""
    served = sorted(record.ttft_s for record in records if not record.refused)
    return served[int(0.99 * len(served))]


def last_s(records: list[Record]) -> float:
    """When the last of them began to be answered."""
    return max(record.at_s + record.ttft_s for record in records)


def good(records: list[Record]) -> int:
    return sum(record.meets(YIELDING) for record in records)


def test_traffic_keeps_its_objectives_beside_work_that_yields_which_is_done_as_soon() -> None:
    beside, lines = run(300, YIELDING)
    plain, plain_lines = run(300, PLAIN)
    assert good(beside) == len(beside) > good(plain)
    assert p99_ttft_s(beside) < 0.5 * p99_ttft_s(plain)
    assert not any(record.refused for record in lines)
    assert last_s(lines) < 1.1 * last_s(plain_lines)
