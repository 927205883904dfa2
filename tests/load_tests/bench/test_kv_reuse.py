"""One small run of the benchmark `kv_reuse`: what is fetched gives the answers that computing gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_tests.bench.kv_reuse import parse, run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

WAYS = ["recompute", "cached", "fetch_prefill", "fetch_decode"]


async def test_a_small_run_gives_equal_answers_and_all_figures(tmp_path: Path) -> None:
    options = parse(["--tokens", "300", "--repeats", "1", "--slowed", "1", "--ways", ",".join(WAYS)])
    figures = await run(options, tmp_path)
    assert figures["answers_equal"]
    assert set(figures["by_tokens"]["300"]) == set(WAYS)
    assert all(each["ttft_s_p50"] > 0 for each in figures["by_tokens"]["300"].values())
    assert 0 < figures["fetches"]["digest_share_target"] < 1
    assert 0 < figures["fetches"]["digest_share_source"] < 1
    assert set(figures["prefill_slowdown"]) == {"over_alone", "over_cached"}
    assert figures["targets"].keys() == {"prefill_slowed_under_3_percent"}, "none at 1,000 tokens"
