"""What a leaving replica has cached goes to others over the KV channel: real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import DiskKVConfig
from deployments.manager.calls import Drain
from deployments.replica.drain import drain
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, until
from tests.deployments.engine.vllm.test_channel import cluster, model, pool, prompt
from transfer.memory.blocks import chained_hashes

__all__ = ["model"]  # the fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK, DRAIN_S = 32, 60.0


async def goes_on() -> bool:
    return False


async def test_the_prompts_of_a_leaving_replica_are_found_on_others(model: Path) -> None:
    async with cluster(model, pool(), pool(), pool(), fetch=True) as engines:
        for other in (PREFILL, LARGE):
            await engines.manager.ask(Drain(other))
        shared = prompt(320)
        known = [[*shared, *prompt(50 * number + 40)] for number in range(3)]
        answers = [(await engines.answer(each, max_tokens=6)).tokens for each in known]
        for other in (PREFILL, LARGE):
            await engines.manager.ask(Drain(other, resume=True))
        await until(lambda: engines._are_ready((PREFILL, LARGE)))
        await drain(engines.replicas[SMALL], DRAIN_S, goes_on)
        counted, index = engines.manager._draining.counts, engines.manager._allocator.predictors.index
        assert counted["came"] == 4, "what they share, and the end of each"
        assert counted["failed"] == 0
        blocks = [len(each) // BLOCK for each in known]
        assert counted["blocks"] == sum(blocks) - 2 * len(shared) // BLOCK
        for each, count in zip(known, blocks, strict=True):
            there = index.hits(chained_hashes(each, BLOCK))
            assert max(there.get(PREFILL, 0), there.get(LARGE, 0)) == count
        fetched = [await engines.replicas[each].counters() for each in (PREFILL, LARGE)]
        assert sum(each["blocks_fetched"] for each in fetched) == counted["blocks"]
        for each, tokens in zip(known, answers, strict=True):
            assert (await engines.answer(each, max_tokens=6)).tokens == tokens
            assert (await engines.answer(each, max_tokens=6, prompt_logprobs=0)).tokens == tokens
        await engines.closed()


async def test_a_leaving_replica_waits_until_its_tier_has_what_it_gets(model: Path, tmp_path: Path) -> None:
    """Then another process may find it."""
    tiered = pool(disk_kv=DiskKVConfig(path=str(tmp_path), bytes=64 << 20))
    async with cluster(model, tiered, pool()) as engines:
        known = prompt(900)
        answer = (await (await engines.ask(known, max_tokens=6)).over()).tokens
        await drain(engines.replicas[PREFILL], DRAIN_S, goes_on)
        assert (await engines.replicas[PREFILL].counters())["tier_disk_stored"] == len(known) // BLOCK
    async with cluster(model, tiered, pool()) as engines:
        assert (await (await engines.ask(known, max_tokens=6)).over()).tokens == answer
        assert (await engines.replicas[PREFILL].counters())["tier_disk_hits"] == (len(known) - 1) // BLOCK
