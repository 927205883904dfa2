"""What API keys have used of their limits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deployments.messages import Admit, Allowance, Mode, Placement, Quota, Reject, SessionRequest
from deployments.policy.admission.quotas import MINUTE_S, REQUESTS, TOKENS, Minute, Quotas

KEY = Quota("a", requests=3, tokens=100, answers=1)


def ask(
    session_id: str, prompt: int = 10, most: int = 20, quota: Quota | None = KEY, attempt: int = 1
) -> SessionRequest:
    return SessionRequest(session_id, prompt, most, quota=quota, attempt=attempt)


def placed(quotas: Quotas, session_id: str, epoch: int = 1, now_s: float = 0.0) -> Allowance | None:
    """Place it. Returns what its caller learns of its key."""
    placement = Placement(session_id, epoch, Mode.DECODE_LOCAL, "", None, None, 1, 1.0, 1.0)
    decision = quotas.decided(session_id, Admit(placement), now_s)
    assert isinstance(decision, Admit)
    assert decision.placement is placement
    return decision.allowance


def used(quotas: Quotas, now_s: float = 0.0) -> tuple[int, int]:
    shown = quotas.describe(now_s)["a"]
    return shown["requests"], shown["tokens"]


def test_no_minute_has_more_than_the_limit() -> None:
    """No window of 60 s holds more than the limit, in any order of arrivals."""
    rng = random.Random(7)
    minute, let_through, now_s = Minute(), [], 0.0
    for _ in range(5000):
        now_s += rng.expovariate(1.0)
        amount = rng.randint(1, 30)
        if not minute.wait_s(amount, 100, now_s):
            minute.add(amount, now_s)
            let_through.append((now_s, amount))
    for start_s, _ in let_through:
        assert sum(amount for at_s, amount in let_through if start_s <= at_s < start_s + MINUTE_S) <= 100
    assert sum(amount for _, amount in let_through) > 0.8 * 100 * now_s / MINUTE_S, "nor much less"


def test_after_the_wait_that_was_told_it_fits_and_not_before() -> None:
    minute = Minute()
    for now_s in (0.5, 10.2, 20.9):
        minute.add(30, now_s)
    wait_s = minute.wait_s(50, 100, 21.0)
    assert 0 < wait_s <= MINUTE_S + 1
    assert minute.wait_s(50, 100, 21.0 + wait_s - 0.001) > 0
    assert minute.wait_s(50, 100, 21.0 + wait_s) == 0.0


def test_the_limit_of_requests() -> None:
    quotas = Quotas()
    assert [quotas.open(ask(f"s{i}", 1, 1), 5.0) for i in range(3)] == [None] * 3
    refusal = quotas.open(ask("s3", 1, 1), 6.0)
    assert isinstance(refusal, Reject)
    assert (refusal.code, refusal.retry_after_s) == (REQUESTS, 60.0)
    assert "a has requests_per_minute 3" in refusal.reason
    assert quotas.open(ask("s4", 1, 1), 66.0) is None


def test_the_limit_of_tokens_counts_the_prompt_and_the_longest_answer() -> None:
    quotas = Quotas()
    assert quotas.open(ask("s", 30, 50), 0.0) is None
    refusal = quotas.open(ask("t", 1, 20), 1.0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == (TOKENS, 60.0)
    assert quotas.open(ask("u", 1, 19), 1.0) is None


def test_what_was_not_used_is_given_back() -> None:
    quotas = Quotas()
    quotas.open(ask("s", 30, 50), 0.0)
    placed(quotas, "s")
    quotas.closed("s", 1, "stop", 7, 2.0)
    assert used(quotas, 2.0) == (1, 37)
    quotas.closed("s", 1, "stop", 7, 2.0)
    assert used(quotas, 2.0) == (1, 37), "once"


def test_what_is_given_back_after_a_minute_makes_no_room() -> None:
    quotas = Quotas()
    quotas.open(ask("s", 30, 50), 0.0)
    placed(quotas, "s")
    assert used(quotas, 61.0) == (0, 0)
    quotas.closed("s", 1, "stop", 7, 61.0)
    assert used(quotas, 61.0) == (0, 0)


def test_an_end_of_which_little_is_known_gives_nothing_back() -> None:
    quotas = Quotas()
    quotas.open(ask("s"), 0.0)
    placed(quotas, "s")
    quotas.closed("s", 1, "expired", None, 2.0)
    assert used(quotas) == (1, 30)


@pytest.mark.parametrize("way", ["refused", "withdrawn", "left", "abandoned"])
def test_what_is_not_served_is_not_counted(way: str) -> None:
    quotas = Quotas()
    quotas.open(ask("s"), 0.0)
    if way == "refused":
        quotas.decided("s", Reject("full", 1.0), 1.0)
    elif way == "left":
        quotas.withdrawn("s")
    else:
        placed(quotas, "s")
        quotas.withdrawn("s") if way == "withdrawn" else quotas.closed("s", 1, "abandoned", None, 1.0)
    assert used(quotas) == (0, 0)


def test_a_request_over_the_limit_gets_an_empty_minute_and_owes_the_rest() -> None:
    quotas = Quotas()
    quotas.open(ask("small", 1, 1), 0.0)
    assert quotas.open(ask("s", 90, 500), 1.0) is not None
    assert quotas.open(ask("s", 90, 500), 61.0) is None
    assert used(quotas, 61.0) == (1, 100)
    placed(quotas, "s")
    quotas.closed("s", 1, "length", 500, 70.0)
    assert used(quotas, 70.0) == (1, 590)
    assert quotas.open(ask("t", 1, 1), 121.5) is not None, "it owes 490"
    assert quotas.open(ask("t", 1, 1), 131.0) is None


def test_a_request_of_several_answers_is_one_and_is_let_through_as_a_whole() -> None:
    quotas, many = Quotas(), replace(KEY, answers=3)
    assert quotas.open(ask("s0", quota=many), 0.0) is None
    for part in ("s1", "s2"):
        assert quotas.open(ask(part, quota=replace(KEY, answers=0)), 0.0) is None
    assert used(quotas) == (1, 90)
    assert quotas.open(ask("t0", 1, 10, quota=replace(KEY, answers=1)), 0.0) is not None
    other = Quotas()
    other.open(ask("small", 1, 10), 0.0)
    refusal = other.open(ask("s0", quota=many), 0.0)
    assert refusal is not None
    assert refusal.code == TOKENS


def test_a_session_that_is_placed_again_is_not_refused_nor_its_prompt_counted_twice() -> None:
    quotas = Quotas()
    quotas.open(ask("s", 30, 50), 0.0)
    placed(quotas, "s")
    quotas.closed("s", 1, "lost", 10, 1.0)
    assert used(quotas) == (1, 40)
    again = ask("s", 40, 40, replace(KEY, answers=0), attempt=2)
    assert quotas.open(again, 1.0) is None
    assert used(quotas) == (1, 80)
    placed(quotas, "s", epoch=2)
    quotas.closed("s", 2, "stop", 5, 3.0)
    assert used(quotas) == (1, 45)


def test_each_decision_says_what_the_key_has_left() -> None:
    quotas = Quotas()
    quotas.open(ask("s", 10, 20), 5.5)
    assert placed(quotas, "s", now_s=5.5) == Allowance(2, 60.5, 70, 60.5)
    quotas.open(ask("t", 10, 20), 20.2)
    refused = quotas.decided("t", Reject("full", 1.0), 21.0)
    assert isinstance(refused, Reject)
    assert refused.reason == "full"
    assert refused.allowance == Allowance(2, 45.0, 70, 45.0), "a request that has no place counts no more"
    over = quotas.open(ask("u", 10, 61), 30.0)
    assert isinstance(over, Reject)
    assert over.allowance == Allowance(2, 36.0, 70, 36.0)
    assert quotas.decided("u", over, 31.0) is over
    quotas.open(ask("v", 1, 1), 66.0)
    assert placed(quotas, "v", now_s=66.0) == Allowance(2, 61.0, 98, 61.0), "the first minute is over"


def test_what_is_owed_leaves_nothing_and_what_is_given_back_needs_no_time() -> None:
    quotas = Quotas()
    quotas.open(ask("s", 90, 500), 0.0)
    assert placed(quotas, "s") == Allowance(2, 61.0, 0, 61.0)
    quotas.closed("s", 1, "length", 500, 10.0)
    refusal = quotas.open(ask("t", 1, 1), 11.0)
    assert refusal is not None
    assert refusal.allowance == Allowance(2, 50.0, 0, 60.0)
    other = Quotas()
    other.open(ask("s", 0, 50), 0.0)
    placed(other, "s")
    other.closed("s", 1, "stop", 0, 1.0)
    assert other.open(ask("t", 1, 1), 1.0) is None
    left = placed(other, "t", now_s=2.5)
    assert left == Allowance(1, 59.5, 98, 59.5)


def test_of_a_limit_that_a_key_does_not_have_nothing_is_said() -> None:
    quotas = Quotas()
    quotas.open(ask("s", quota=replace(KEY, tokens=0)), 0.0)
    assert placed(quotas, "s") == Allowance(2, 61.0, 0, 0.0)
    quotas.open(ask("t", quota=None), 0.0)
    assert placed(quotas, "t") is None


def test_a_key_without_limits_is_not_in_the_books_and_keys_do_not_share_one() -> None:
    quotas = Quotas()
    assert quotas.open(ask("s", quota=None), 0.0) is None
    assert quotas.describe(0.0) == {}
    for number in range(3):
        quotas.open(ask(f"a{number}", 1, 1), 0.0)
    assert quotas.open(ask("b", quota=replace(KEY, key="b")), 0.0) is None
    assert quotas.open(ask("c", quota=Quota("c", tokens=100, answers=1)), 0.0) is None
