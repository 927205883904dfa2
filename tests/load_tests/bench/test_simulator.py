"""The simulator's side of the comparison with the real cluster."""

from __future__ import annotations

from collections import Counter

import pytest

from load_tests.bench.simulator import ANSWERS, PROMPTS, Seen, compare, every_way, simulate, way_of
from load_tests.simulator.profiles import CPU_STEPS
from load_tests.simulator.synthetic import poisson

LEARNED = {"prefill": CPU_STEPS, "decode-main": CPU_STEPS}


def test_all_requests_are_split_where_that_is_set() -> None:
    trace = poisson(1.0, 60, 1, PROMPTS, ANSWERS)
    answers = simulate(trace, LEARNED, 0.04, "always", seed=1)
    assert [each.way for each in answers] == ["split"] * 60
    assert all(each.ttft_s > 0.04 / 2 for each in answers)


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_each_way_serves_some_of_its_trace(rate: float) -> None:
    trace = every_way(rate, 80, seed=1)
    ways = Counter(each.way for each in simulate(trace, LEARNED, 0.04, "auto", seed=1))
    assert ways.total() == 80
    assert ways.keys() >= {"split", "on decode", "on prefill", "on decode, cached"}


def test_a_later_turn_repeats_the_blocks_of_an_earlier_prompt_and_no_other_request_has_them() -> None:
    requests = every_way(0.5, 80, seed=2).requests
    seen: list[tuple[int, ...]] = []
    for request in requests:
        assert len(request.hashes) == request.prompt_tokens // 128
        known = {block for hashes in seen for block in hashes} & set(request.hashes)
        assert not known or request.hashes[: len(known)] in seen
        seen.append(request.hashes)
    assert len({block for hashes in seen for block in hashes}) < sum(map(len, seen)), "some turns are later ones"


def test_the_way_of_a_request_is_what_its_header_and_its_usage_say() -> None:
    assert way_of("decode_local", 128) == "on decode, cached"
    assert way_of("prefill_local", 0) == "on prefill"
    assert way_of("decode_local,disaggregated", 0) == "moved"


def test_a_ratio_that_is_farther_off_than_its_target_is_not_met() -> None:
    figures = compare([Seen(1.0, 0.1)] * 9, [Seen(1.1, 0.2)] * 9)
    assert figures["ttft_s_p50"]["met"]
    assert not figures["tpot_s_p50"]["met"]
    assert figures["tpot_s_p90"]["ratio"] == 2.0
