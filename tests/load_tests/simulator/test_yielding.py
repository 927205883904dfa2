"""Work that yields, beside online traffic in virtual time: what the traffic loses, and what the work gets."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest

from configs.schema import BatonConfig
from deployments.messages import Role
from deployments.policy import giving_way
from deployments.policy.allocator import Allocator
from load_tests.simulator import synthetic
from load_tests.simulator.cluster import Options
from load_tests.simulator.metrics import Classes, Objectives, Record
from load_tests.simulator.profiles import Cluster, Pool, heterogeneous
from load_tests.simulator.simulation import Simulation
from load_tests.simulator.traces import Trace, TraceRequest

CHAT = Objectives("chat", ttft_s=2.0, tpot_s=0.05, most_prompt_tokens=1000)
YIELDING: Classes = (CHAT, Objectives("night", 1e9, 1e9, yields=True))
PLAIN: Classes = (CHAT, Objectives("night", 1e9, 1e9))
SHORT = synthetic.Lengths(400, 0.8, least=16, most=1000)
BLOCK = synthetic.BLOCK_TOKENS
PROMPT, ANSWER = 2000, 300
TIER_BYTES = 200e9
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Ran:
    """The records of the traffic and those of the lines. `let_go`: how often lines gave way. `moved`: all moves."""

    chats: list[Record]
    lines: list[Record]
    let_go: int
    moved: int


def lines_of(count: int, at_s: float = 0.0) -> list[TraceRequest]:
    """Lines that come at once, each with a prompt and an answer of its own."""
    return synthetic.lines(count, PROMPT, ANSWER, at_s)


FLEET = heterogeneous(6, tier_bytes=TIER_BYTES)


def small(tokens: int) -> Cluster:
    """The same fleet, with decode memory for so many tokens a replica, where only those of decode pools write."""

    def part(pool: Pool) -> Pool:
        if pool.role is Role.PREFILL:
            return replace(pool, strict=True)
        return replace(pool, profile=replace(pool.profile, kv_bytes=tokens * pool.profile.kv_bytes_per_token))

    return replace(FLEET, pools=tuple(map(part, FLEET.pools)))


def run(
    chats: Sequence[TraceRequest],
    lines: Iterable[TraceRequest],
    classes: Classes = YIELDING,
    fleet: Cluster = FLEET,
) -> Ran:
    allocators = []

    def allocator(config: BatonConfig, rng: random.Random) -> Allocator:
        allocators.append(Allocator(config, rng))
        return allocators[-1]

    requests = sorted((*chats, *lines), key=lambda request: request.at_s)
    options = replace(Options(), queue_timeout_s=1e5, max_queued_requests=10_000)
    result = Simulation(fleet, Trace("both", BLOCK, tuple(requests)), classes, options, allocator).run()
    assert result.blocks_in_use == 0
    assert result.preemptions == 0
    is_line = [record.prompt_tokens == PROMPT for record in result.records]
    chat, line = (
        [each for each, of in zip(result.records, is_line, strict=True) if of is which] for which in (False, True)
    )
    return Ran(chat, line, allocators[0].giving_way.count, result.moves)


def traffic(requests_per_s: float, count: int) -> tuple[TraceRequest, ...]:
    return synthetic.poisson(requests_per_s, count, seed=3, prompts=SHORT).requests


def p99(values: Iterable[float]) -> float:
    in_order = sorted(values)
    return in_order[int(0.99 * len(in_order))]


def p99_ttft_s(records: Iterable[Record]) -> float:
    """Of those that were served."""
    return p99(record.ttft_s for record in records if not record.refused)


def last_s(records: Iterable[Record]) -> float:
    """When the last of them began to be answered."""
    return max(record.at_s + record.ttft_s for record in records)


def good(records: Iterable[Record]) -> int:
    return sum(record.meets(YIELDING) for record in records)


def lines_per_s(records: Iterable[Record], from_s: float, until_s: float) -> float:
    """How many lines were answered in a second of this time."""
    return sum(from_s <= record.end_s <= until_s for record in records) / (until_s - from_s)


def test_traffic_keeps_its_objectives_beside_work_that_yields() -> None:
    """All lines come in the middle of it. As a class that only has a higher rank they keep chats out."""
    chats = traffic(20.0, 1200)
    lines = lines_of(300, chats[300].at_s)
    beside, plain = run(chats, lines), run(chats, lines, PLAIN)
    assert good(beside.chats) == len(beside.chats) > good(plain.chats)
    assert p99_ttft_s(beside.chats) < 0.25 * p99_ttft_s(plain.chats)
    assert not any(record.refused for record in beside.lines)
    assert last_s(beside.lines) < 1.5 * last_s(plain.lines)


def test_bursts_find_room_at_once_where_lines_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 chats come at a time, and lines have the memory. They give it back, and go on later."""
    fleet = small(120_000)
    chats, lines = synthetic.burst(10.0, 640, seed=3, size=64, prompts=SHORT).requests, lines_of(400)
    alone, beside = run(chats, (), fleet=fleet), run(chats, lines, fleet=fleet)
    assert good(alone.chats) == good(beside.chats) == len(chats)
    assert p99_ttft_s(beside.chats) < 1.1 * p99_ttft_s(alone.chats)
    assert p99(each.tpot_s for each in beside.chats) < 1.1 * p99(each.tpot_s for each in alone.chats)
    assert beside.let_go > 40
    assert not any(record.refused for record in beside.lines)
    plain, last = run(chats, lines, PLAIN, fleet), chats[-1].at_s
    assert good(plain.chats) < 0.8 * len(chats)
    assert lines_per_s(beside.lines, 5.0, last) > 0.8 * lines_per_s(plain.lines, 5.0, last)
    monkeypatch.setattr(giving_way, "may_be_let_go", lambda request: False)
    stays = run(chats, lines, fleet=fleet)
    assert stays.let_go == 0
    assert good(stays.chats) < 0.9 * len(chats)
    assert p99_ttft_s(stays.chats) > 3 * p99_ttft_s(beside.chats)


CHATS_ALONE_PER_S, LINES_ALONE_PER_S = 167.0, 51.8
"""What the fleet answers of each, when all come at once, without objectives, and nothing else does."""


def test_what_is_idle_is_used() -> None:
    """A quarter of what the fleet could do is asked for, and lines are there all the time."""
    chats = traffic(40.0, 1200)
    beside = run(chats, lines_of(900))
    assert good(beside.chats) == len(chats)
    assert p99_ttft_s(beside.chats) < 0.15 * CHAT.ttft_s
    idle = (1.0 - 40.0 / CHATS_ALONE_PER_S) * LINES_ALONE_PER_S
    assert lines_per_s(beside.lines, 8.0, chats[-1].at_s) > 0.45 * idle
