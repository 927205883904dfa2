"""Two unlike decode pools under a skewed mix of long and short requests."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.e2e.client import client_of, complete
from tests.e2e.cluster import Cluster, total
from tests.e2e.conftest import prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SHORT, LONG = (40, 24), (700, 200)
SKEWED = [SHORT] * 36 + [LONG] * 4


async def test_unlike_pools_share_by_memory_and_never_preempt(baton: Cluster) -> None:
    """At once, so that `small` cannot hold its share of what comes, and more sessions than it may run."""
    before = await asyncio.to_thread(baton.settled)
    mix = random.Random(5).sample(SKEWED, len(SKEWED))
    async with client_of(baton) as client:
        asked = [complete(client, prompt(500 + i, length), answer) for i, (length, answer) in enumerate(mix)]
        answers = await asyncio.gather(*asked)
    after = await asyncio.to_thread(baton.settled)
    assert [answer.status_code for answer in answers] == [200] * len(mix)
    for answer, (_, tokens) in zip(answers, mix, strict=True):
        choice = answer.json()["choices"][0]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", tokens)

    def grew(counter: str, pool: str) -> float:
        return total(after, "decode", counter, pool) - total(before, "decode", counter, pool)

    for pool in ("decode-small", "decode-large"):
        assert grew("preemptions", pool) == 0
        assert grew("handoffs_received", pool) > 0, "every pool is used"
    tokens = {pool: grew("loaded_tokens", pool) for pool in ("decode-small", "decode-large")}
    share = tokens["decode-small"] / sum(tokens.values())
    assert share < 0.35, f"small has 21 of 156 blocks, and got {share:.0%} of the tokens"
