"""The size of a step: as many prompt tokens as its answers allow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.policy.step_size import (
    LEAST_SHARE,
    STEADY,
    allowed_step_s,
    prompt_budget,
    share_of_each,
    share_of_one,
)
from deployments.step_cost import Coefficients

STEPS = Coefficients(base_s=0.01, prefill_token_s=1e-4, prefill_context_s=1e-7, sequence_s=1e-3, context_s=1e-6)
NOTHING = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0)
WHOLE = 2048


def budget(sequences: int = 4, objectives: tuple[float, ...] = (0.05,), begun: int = 0, share: float = 0.75) -> int:
    return prompt_budget(STEPS, WHOLE, sequences, 1000 * sequences, begun, objectives, share)


def step_s(tokens: int, sequences: int = 4, begun: int = 0) -> float:
    return STEPS.step_s(tokens, tokens * begun + tokens * (tokens - 1) / 2, sequences, 1000 * sequences)


def test_without_answers_prompts_take_the_whole_step() -> None:
    assert budget(0, ()) == WHOLE


def test_a_pool_whose_steps_are_not_known_takes_whole_steps() -> None:
    assert prompt_budget(NOTHING, WHOLE, 4, 4000, 0, (0.05,), 0.75) == WHOLE - 4


def test_a_step_takes_as_long_as_the_tightest_objective_allows() -> None:
    tokens = budget(objectives=(0.2, 0.05))
    assert step_s(tokens) <= STEADY * 0.05 < step_s(tokens + 2)


def test_beside_answers_without_an_objective_prompts_get_their_share_of_a_step() -> None:
    tokens, decoding_s = budget(objectives=(0.0,)), step_s(0)
    assert (step_s(tokens) - decoding_s) / step_s(tokens) == pytest.approx(0.75, abs=0.01)
    assert allowed_step_s(0.0, decoding_s, 0.75) == pytest.approx(4 * decoding_s)


def test_an_answer_whose_kv_is_coming_counts_before_it_runs() -> None:
    assert budget(0, (0.05,)) < budget(0, ())


@settings(deadline=None)
@given(st.integers(1, 64), st.floats(1e-4, 1.0), st.integers(0, 100_000))
def test_prompts_never_starve_and_chunks_shrink_along_a_prompt(sequences: int, objective_s: float, begun: int) -> None:
    tokens = budget(sequences, (objective_s,), begun)
    assert 1 <= tokens <= WHOLE - sequences
    assert budget(sequences, (objective_s,), begun + 10_000) <= tokens
    least_s = step_s(0, sequences) / (1.0 - LEAST_SHARE)
    if tokens < WHOLE - sequences:
        assert step_s(tokens + 2, sequences, begun) > max(STEADY * objective_s, least_s) - 1e-9


def test_a_prompt_leaves_room_for_a_shorter_one_behind_it_but_no_more_than_half() -> None:
    assert share_of_one(100, [500]) == 100
    assert share_of_one(100, [500, 30]) == 70
    assert share_of_one(100, [500, 400, 80]) == 50
    assert share_of_one(100, [500, 500, 900]) == 100, "the others are not shorter"
    assert share_of_one(1, [500, 30]) == 1
    assert share_of_one(100, []) == 100


@given(st.integers(1, 4096), st.lists(st.integers(1, 5000), max_size=8))
def test_equal_shares_fit_the_budget_and_one_token_more_of_each_does_not(budget: int, prompts: list[int]) -> None:
    one = share_of_each(budget, prompts)
    taken = sum(min(one, tokens) for tokens in prompts)
    assert one >= 1
    assert taken <= budget or one == 1
    assert sum(min(one + 1, tokens) for tokens in prompts) > budget or one == budget or taken == sum(prompts)


def test_shorter_prompts_are_computed_whole_and_the_others_have_equal_parts() -> None:
    assert share_of_each(100, [10, 500, 700]) == 45
    assert share_of_each(100, [30, 20]) == 100
    assert share_of_each(100, []) == 100
    assert share_of_each(2, [9, 9, 9]) == 1
