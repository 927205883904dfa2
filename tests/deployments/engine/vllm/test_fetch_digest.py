"""A bit that flips on the way between two real engines: its block is computed, and the answer is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.manager.calls import Drain
from load_tests.harness.control_plane import PREFILL, SMALL
from tests.deployments.engine.vllm.flipping_plane import flip_when_told
from tests.deployments.engine.vllm.test_channel import cluster, fetches_pay, is_back, model, pool, prompt

__all__ = ["fetches_pay", "model"]  # the fixtures

BLOCK, CACHED = 32, 16

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("fetches_pay")
async def test_a_flipped_bit_is_found_and_the_answer_is_right(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the first block, one in the midst and the last; and between them nothing is flipped, and all comes."""
    order = tmp_path / "order"
    flip_when_told(monkeypatch, order, SMALL)
    strict = pool().model_copy(update={"strict": True})
    async with cluster(model, strict, pool(), fetch=True) as engines:
        for flipped in (None, 0, None, 9, CACHED - 1):
            known = prompt(700)
            await engines.manager.ask(Drain(PREFILL))
            await engines.alone(known[: CACHED * BLOCK], max_tokens=1)
            await engines.manager.ask(Drain(PREFILL, resume=True))
            await is_back(engines, known, CACHED)
            before = await engines.replicas[PREFILL].counters()
            if flipped is not None:
                order.write_text(str(flipped))
            answer = await (await engines.ask(known, max_tokens=6)).over()
            after = await engines.replicas[PREFILL].counters()
            assert not order.exists(), "it was flipped"
            came, corrupt = (after[name] - before[name] for name in ("blocks_fetched", "fetches_corrupt"))
            assert (came, corrupt) == ((CACHED, 0) if flipped is None else (flipped, 1))
            assert answer.tokens == (await engines.answer(known, max_tokens=6, prompt_logprobs=0)).tokens
        await engines.all_is_free()
