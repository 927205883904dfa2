"""A running session is moved from one decode replica to the other: the client sees a short gap, and the same answer."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.e2e.adapters import NAMES
from tests.e2e.client import MODEL, streamed, until
from tests.e2e.cluster import Cluster, total
from tests.e2e.conftest import LONG_ANSWER_TOKENS, questions
from tests.e2e.mover import Mover, mover_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MOVE_AFTER = (5, 15, 25)
"""Tokens of the answer; there is time for all of it before its last one."""


WITHIN_S = 60.0


def has_left(cluster: Cluster, replica: str) -> bool:
    """Whether the one session is placed on another replica by now."""
    places = [promise["decode"] for promise in cluster.status()["promises"]]
    return len(places) == 1 and places != [replica]


@pytest.fixture(scope="module")
def mover(baton: Cluster) -> Iterator[Mover]:
    with mover_of(baton, "decode-small", "decode-large") as started:
        yield started


@pytest.mark.parametrize("model", [MODEL, NAMES[0]])
async def test_a_running_session_is_moved_to_and_fro_and_its_answer_is_the_same(
    baton: Cluster, reference: dict[str, list[int]], mover: Mover, model: str
) -> None:
    asked, _ = questions()["recovery-long"]
    question = "recovery-long" if model == MODEL else f"{model} recovery-long"
    before = await asyncio.to_thread(baton.settled)
    tokens: list[int] = []
    times_s: list[float] = []
    moves: list[float] = []
    known = 0
    async for choice in streamed(baton, asked, LONG_ANSWER_TOKENS, model=model):
        tokens += choice["token_ids"] or []
        times_s.append(time.monotonic())
        if len(moves) < len(MOVE_AFTER) and len(tokens) >= MOVE_AFTER[len(moves)]:
            (promise,) = (await asyncio.to_thread(baton.status))["promises"]
            pool = before["replicas"][promise["decode"]]["pool"]
            known += len(asked) + len(tokens)
            moves.append(time.monotonic())
            assert await asyncio.to_thread(mover.let_go, pool) == 1
            await until(partial(has_left, baton, promise["decode"]), WITHIN_S, "another replica has it")
    assert tokens == reference[question]
    after = await asyncio.to_thread(baton.settled)
    closed = [status["sessions"]["closed"].get("moved", 0) for status in (before, after)]
    assert closed[1] - closed[0] == len(MOVE_AFTER)
    assert total(after, "decode", "moved_out") - total(before, "decode", "moved_out") == len(MOVE_AFTER)
    assert total(after, "decode", "preemptions") == 0
    written = total(after, "decode", "blocks_written") - total(before, "decode", "blocks_written")
    assert written > 0, "the KV cache went by the channel"
    there = sum(
        total(after, "decode", each) - total(before, "decode", each) for each in ("cached_tokens", "loaded_tokens")
    )
    at_least = len(asked) + 2 * known - len(MOVE_AFTER)
    assert there >= at_least, "of what the client had, the replica that lets go computes the last token, the other none"
    assert not baton.used_blocks()
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    step_s = statistics.median(gaps_s)
    longest_s = sorted(gaps_s)[-len(moves) :]
    print(f"a step {step_s * 1e3:.1f} ms; the longest gaps {[f'{each / step_s:.1f} steps' for each in longest_s]}")
