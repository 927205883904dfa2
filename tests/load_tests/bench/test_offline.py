"""The benchmark `offline`: every way gets the same requests, and a small run on real engines has all figures."""

from __future__ import annotations

import pytest

from load_tests.bench.offline import ANSWERS, KV_TOKENS, PROMPT_TOKENS, SEATS, best, in_turn, parse, requests, run

WAYS = {"default", "tuned", "temporal", "auto"}


def test_every_way_gets_the_same_requests() -> None:
    assert requests(50, 1) == requests(50, 1)
    assert requests(50, 1)[:20] == requests(20, 1)
    assert requests(50, 1) != requests(50, 2)


def test_requests_are_of_the_lengths_that_are_said() -> None:
    asked = requests(1000, 1)
    prompts = [len(each.prompt) for each in asked]
    assert min(prompts) >= PROMPT_TOKENS[0]
    assert max(prompts) <= PROMPT_TOKENS[1]
    assert max(each.answer_tokens for each in asked) == ANSWERS.most
    mean = sum(len(each.prompt) + each.answer_tokens for each in asked) / len(asked)
    assert SEATS * mean / 3 < KV_TOKENS < SEATS * mean * 0.7, "memory bounds what runs, and not seats"


def test_the_order_of_the_ways_changes() -> None:
    assert [in_turn(["a", "b", "c"], turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_the_best_budget_is_the_fastest() -> None:
    assert best({64: 10.0, 128: 12.0, 256: 11.0}) == 128


def test_the_command_line() -> None:
    options = parse(["--budgets", "64,256", "--stages", "2"])
    assert (options.budgets, options.stages) == ([64, 256], [2])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_small_run_has_all_figures() -> None:
    """Of this seed, no answer has more than 27 tokens."""
    small = "--requests 6 --searched 4 --learned 1 --budgets 64 --stages 2 --rounds 1 --kv-tokens 1024 --seed 349"
    options = parse(small.split())
    result = await run(options)
    found = result["pp"]["2"]
    assert found.keys() == {*WAYS, "ratios", "searched", "unlike"}
    assert all(found[way]["output_tokens_per_s"] > 0 for way in WAYS)
    assert all(0 < found[way]["bubble_share"] < 1 for way in WAYS)
    assert found["temporal"]["mixed_share"] < found["default"]["mixed_share"] or not found["default"]["mixed_share"]
    assert found["unlike"].keys() == WAYS
    assert result["targets"].keys() == {"temporal", "auto"}
    assert all(each.keys() == {"pp_2_at_least_1.15"} for each in result["targets"].values())
