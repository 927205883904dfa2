"""Two unlike decode pools under a skewed mix of long and short requests."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.e2e.client import client_of, complete
from tests.e2e.cluster import Cluster, total

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SENTENCE = " is the number of a story. Once upon a time there was a fox, and it was quick and brown and fond of dogs."
SHORT, LONG = (1, 472), (25, 200)
SKEWED = [SHORT] * 56 + [LONG] * 2
"""Sentences, and the most tokens of an answer: 4 and 7 blocks of 128 each, half as much again as there is."""


async def test_unlike_pools_share_by_memory_and_never_preempt(baton: Cluster) -> None:
    """At once: both pools are full until the last have their place. Answers end at their first space, very soon."""
    before = await asyncio.to_thread(baton.settled)
    mix = random.Random(5).sample(SKEWED, len(SKEWED))
    async with client_of(baton) as client:
        asked = [complete(client, f"{i}{SENTENCE * n}", most, stop=[" "]) for i, (n, most) in enumerate(mix)]
        answers = await asyncio.gather(*asked)
    after = await asyncio.to_thread(baton.settled)
    assert [answer.status_code for answer in answers] == [200] * len(mix), [answer.text for answer in answers]

    def grew(counter: str, pool: str) -> float:
        return total(after, "decode", counter, pool) - total(before, "decode", counter, pool)

    shares = {pool: grew("handoffs_received", pool) for pool in ("decode-small", "decode-large")}
    assert sum(grew("preemptions", pool) for pool in shares) == 0
    share = shares["decode-small"] / sum(shares.values())
    assert 0.04 < share < 0.3, f"small has 21 of 156 blocks, and got {share:.0%} of the sessions"
