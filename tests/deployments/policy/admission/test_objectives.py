"""Early refusal: a prediction over an objective is refused with its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.messages import Forecast, Reject
from deployments.policy.admission.classes import PriorityClass
from deployments.policy.admission.objectives import verdict

CHAT = PriorityClass("interactive", ttft_s=2.0, tpot_s=0.05)
LATE = Forecast(queue_s=3.0, prefill_s=1.0, transfer_s=0.05, ttft_s=4.1, tpot_s=0.02, output_tokens=100, trusted=True)
SLOW = Forecast(ttft_s=0.5, tpot_s=0.08, output_tokens=100, trusted=True)
times_s = st.floats(0.0, 100.0)


def test_what_meets_its_class_goes_ahead() -> None:
    assert verdict(replace(LATE, ttft_s=2.0), CHAT, 0.0) is None
    assert verdict(replace(SLOW, tpot_s=0.05), CHAT, 0.0) is None


def test_a_class_without_objectives_refuses_nothing() -> None:
    assert verdict(replace(LATE, tpot_s=9.0), PriorityClass("batch"), 1e6) is None


def test_a_predictor_that_has_not_learnt_refuses_nothing() -> None:
    assert verdict(replace(LATE, trusted=False), CHAT, 100.0) is None


def test_a_first_token_that_would_be_late_is_refused_with_numbers() -> None:
    refused = verdict(LATE, CHAT, 0.0)
    assert isinstance(refused, Reject)
    assert refused.reason == (
        "predicted TTFT 4.1 s over the 2.0 s of class interactive "
        "(waited 0 ms, queue 3.0 s, prefill 1.0 s, transfer 50 ms)"
    )
    assert refused.code == "predicted_ttft"
    assert refused.retry_after_s == pytest.approx(2.1)


def test_what_was_waited_counts() -> None:
    forecast = replace(LATE, ttft_s=1.0, queue_s=0.0)
    assert verdict(forecast, CHAT, 1.0) is None
    refused = verdict(forecast, CHAT, 1.1)
    assert isinstance(refused, Reject)
    assert "predicted TTFT 2.1 s over the 2.0 s" in refused.reason


def test_tokens_that_would_come_too_slowly_are_refused_with_numbers() -> None:
    refused = verdict(SLOW, CHAT, 0.0)
    assert isinstance(refused, Reject)
    assert refused.reason == "predicted TPOT 80 ms over the 50 ms of class interactive"
    assert refused.code == "predicted_tpot"
    assert refused.retry_after_s == pytest.approx(8.0), "a hundred tokens later"


def test_slack_shifts_the_objectives_and_is_named() -> None:
    assert verdict(LATE, CHAT, 0.0, slack=2.1) is None
    refused = verdict(replace(LATE, ttft_s=1.2), CHAT, 0.0, slack=0.5)
    assert isinstance(refused, Reject)
    assert "predicted TTFT 1.2 s over 0.5 times the 2.0 s of" in refused.reason


def test_what_no_load_would_let_through_is_sent_away_for_the_longest() -> None:
    refused = verdict(replace(LATE, queue_s=0.0), CHAT, 0.0, max_retry_after_s=25.0)
    assert isinstance(refused, Reject)
    assert refused.retry_after_s == 25.0


@given(queue=times_s, prefill=times_s, tpot=times_s, waited=times_s)
def test_an_answer_follows_from_the_numbers(queue: float, prefill: float, tpot: float, waited: float) -> None:
    forecast = Forecast(queue, prefill, ttft_s=queue + prefill, tpot_s=tpot, output_tokens=10, trusted=True)
    found = verdict(forecast, CHAT, waited, max_retry_after_s=30.0)
    assert (found is None) == (waited + queue + prefill <= 2.0 and tpot <= 0.05)
    if found is not None:
        assert found.retry_after_s is not None
        assert 1.0 <= found.retry_after_s <= 30.0
