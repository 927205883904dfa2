"""What the planner reads, taken from the allocator's books."""

from __future__ import annotations

import random

from configs.schema import BatonConfig
from deployments.messages import Admit, Phase, ReplicaInfo, ReplicaSnapshot, Role, SessionRequest, StepSample
from deployments.policy.allocator import Allocator
from deployments.policy.placement.split import ANY
from deployments.policy.predictors import TRUSTED_STEPS
from deployments.policy.scaling.inputs import Now
from deployments.policy.scaling.observe import observe

BLOCK = 16
PRIOR = (5e-3, 1e-4, 0.0, 1e-4, 1e-7)
POOLS = ("prefill", "decode-main")


def allocator(blocks: int = 100, places: int = 64, steps: int = 0, phase: Phase = Phase.READY) -> Allocator:
    pool = {"engine": {"kind": "mock", "block_size": BLOCK}, "strict": True}
    made = Allocator(BatonConfig.model_validate({"prefill": pool, "decode": {"main": pool}}), random.Random(1))
    for name, role in zip(POOLS, (Role.PREFILL, Role.DECODE), strict=True):
        info = ReplicaInfo(
            f"{name}-0",
            name,
            role,
            "node",
            "engine",
            BLOCK,
            blocks,
            places,
            16_384,
            chunk_tokens=512,
            prior=PRIOR,
            strict=True,
        )
        samples = tuple(StepSample(0.01, 50, 1000, 0, 0) for _ in range(steps))
        made.report(ReplicaSnapshot(info.replica_id, 1, phase, info, steps=samples), 0.0)
    return made


def seen(of: Allocator, at_s: float = 0.0) -> Now:
    return observe(of, POOLS, at_s, {"prefill": 2, "decode-main": 1}, {"prefill": [3.0]})


def ask(number: int, prompt: int = 320, answer: int = 320) -> SessionRequest:
    return SessionRequest(str(number), prompt, answer, ANY)


def test_an_idle_fleet() -> None:
    prefill, decode = seen(allocator()).pools
    assert (prefill.name, prefill.role, prefill.target, prefill.ready, prefill.starting) == (
        "prefill",
        Role.PREFILL,
        2,
        1,
        (3.0,),
    )
    assert (decode.blocks, decode.block_size, decode.max_sessions, decode.chunk_tokens) == (100, BLOCK, 64, 512)
    assert (decode.sessions, decode.promised, prefill.backlog_s) == (0, 0, 0)


def test_a_speed_counts_once_enough_steps_were_seen() -> None:
    assert all(pool.steps is None for pool in seen(allocator()).pools)
    assert all(pool.steps is not None for pool in seen(allocator(steps=2 * TRUSTED_STEPS)).pools)


def test_a_placed_session_is_a_prompt_here_and_an_answer_there() -> None:
    books = allocator()
    assert isinstance(books.open(ask(1), 0.0), Admit)
    prefill, decode = seen(books).pools
    assert prefill.backlog_s > 0
    assert prefill.prefill_load > 0
    assert (prefill.sessions, prefill.answers) == (1, 0)
    assert (decode.sessions, decode.answers, decode.promised) == (1, 1, 40)


def test_what_waits_is_told_apart() -> None:
    full = allocator(blocks=70)
    answers = [full.open(ask(number), 0.0) for number in range(3)]
    assert [isinstance(answer, Admit) for answer in answers] == [True, False, False]
    waiting = seen(full).waiting
    assert (waiting.memory, waiting.place, waiting.prefill, waiting.decode_tokens) == (2, 0, 0, 1280)
    crowded = allocator(places=1)
    for number in range(3):
        crowded.open(ask(number), 0.0)
    assert (seen(crowded).waiting.place, seen(crowded).waiting.memory) == (2, 0)


def test_demand_counts_what_waits_and_what_is_refused() -> None:
    books = allocator(blocks=70)
    for number in range(3):
        books.open(ask(number), 0.0)
    books.open(ask(9, prompt=20_000), 0.0)
    assert seen(books).arrived[""].requests == 4


def test_replicas_that_leave_or_are_silent_are_not_ready() -> None:
    assert [pool.ready for pool in seen(allocator(phase=Phase.DRAINING)).pools] == [0, 0]
    assert [pool.ready for pool in seen(allocator(), at_s=60.0).pools] == [0, 0]
