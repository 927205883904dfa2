"""Predicted lengths: as often right as they say, learned from every answer that ends, and never longer than allowed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.messages import SessionRequest
from deployments.policy.prediction.answer_length import BUCKETS, Length, LengthPredictor

LIMIT = 4096


def request(number: int = 0, prompt: int = 500, limit: int = LIMIT, **facts: Any) -> SessionRequest:
    return SessionRequest(f"s{number}", prompt, limit, **facts)


def learn(
    predictor: LengthPredictor, count: int, draw: Callable[[int], tuple[SessionRequest, int]], late: int = 0
) -> list[tuple[Length, int]]:
    """Requests whose answers end `late` requests later; what was predicted of each, and what it was."""
    open_requests, judged = [], []
    for number in range(count):
        asked, tokens = draw(number)
        judged.append((predictor.predict(asked), tokens))
        open_requests.append((asked, tokens))
        if len(open_requests) > late:
            predictor.observe(*open_requests.pop(0))
    return judged


def coverage(judged: list[tuple[Length, int]]) -> tuple[float, float]:
    count = len(judged)
    return sum(n <= length.p50 for length, n in judged) / count, sum(n <= length.p90 for length, n in judged) / count


def skewed(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(5.0, 0.9)))


def two_peaks(rng: random.Random) -> int:
    return max(1, round(rng.gauss(90, 15) if rng.random() < 0.55 else rng.gauss(410, 20)))


def test_before_any_answer_it_may_be_as_long_as_it_may_be() -> None:
    assert LengthPredictor().predict(request(limit=77)) == Length(77, 77, 77.0)


@pytest.mark.parametrize("distribution", [skewed, two_peaks])
@pytest.mark.parametrize("late", [0, 100])
def test_half_and_nine_tenths_of_answers_are_no_longer_than_predicted(
    distribution: Callable[[random.Random], int], late: int
) -> None:
    rng = random.Random(1)
    judged = learn(LengthPredictor(), 1600, lambda n: (request(n), distribution(rng)), late)[500:]
    p50, p90 = coverage(judged)
    assert 0.45 < p50 < 0.55
    assert 0.87 < p90 < 0.93
    assert sum(length.mean for length, _ in judged) == pytest.approx(sum(n for _, n in judged), rel=0.05)


def test_answers_that_become_longer_are_followed() -> None:
    rng, predictor = random.Random(2), LengthPredictor()
    learn(predictor, 600, lambda n: (request(n), skewed(rng)))
    judged = learn(predictor, 1500, lambda n: (request(n), 5 * skewed(rng) // 2), late=50)[500:]
    p50, p90 = coverage(judged)
    assert 0.45 < p50 < 0.55
    assert 0.87 < p90 < 0.93


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"prompt": 100}, {"prompt": 3000}),
        ({"chat": True}, {"chat": False}),
        ({"client": "a"}, {"client": "b"}),
        ({"affinity": "a"}, {"affinity": "b"}),
        ({"limit": 512}, {"limit": 4096}),
    ],
)
def test_kinds_of_requests_are_told_apart(short: dict[str, Any], long: dict[str, Any]) -> None:
    rng, predictor = random.Random(3), LengthPredictor()

    def draw(number: int) -> tuple[SessionRequest, int]:
        return (
            (request(number, **short), rng.randint(20, 40))
            if number % 2
            else (request(number, **long), rng.randint(300, 400))
        )

    learn(predictor, 400, draw)
    assert 20 <= predictor.predict(request(**short)).p50 <= 45
    assert 280 <= predictor.predict(request(**long)).p50 <= 420


def test_a_new_kind_of_request_is_judged_by_the_others() -> None:
    rng, predictor = random.Random(4), LengthPredictor()
    learn(predictor, 300, lambda n: (request(n, client="a", chat=True), rng.randint(90, 110)))
    assert 85 <= predictor.predict(request(prompt=99_000, client="new", affinity="new")).p50 <= 115


def test_answers_cut_off_count_as_longer_ones() -> None:
    """Half of the answers are cut off at 300. Those that are not are of 100 or of 400 tokens, alike often."""
    naive, told = LengthPredictor(), LengthPredictor()
    for number in range(600):
        tokens, is_cut = (300, True) if number % 2 else ((400 if number % 4 else 100), False)
        naive.observe(request(number), tokens)
        told.observe(request(number), tokens, finished_by_limit=is_cut)
    ask = request(limit=4000)
    assert naive.predict(ask).mean < 290
    assert 310 < told.predict(ask).mean < 345  # 0.25 * 100 + 0.75 * 400, in buckets of 6%
    assert told.predict(ask).p50 > naive.predict(ask).p50


def test_answers_that_were_all_cut_off_are_at_least_so_long() -> None:
    predictor = LengthPredictor()
    for number in range(100):
        predictor.observe(request(number), 300, finished_by_limit=True)
    assert predictor.predict(request()).p50 >= 300


def test_calibration_says_how_often_it_was_right() -> None:
    rng, predictor = random.Random(5), LengthPredictor(window=1024)
    judged = learn(predictor, 1200, lambda n: (request(n), two_peaks(rng)))
    said = predictor.calibration()
    assert (said["coverage_p50"], said["coverage_p90"]) == pytest.approx(coverage(judged[-1024:]))
    assert said["count"] == 1200
    spans = [judged[end - 256 : end] for end in (1200, 944, 688, 432)]
    errors = [abs(sum(length.mean for length, _ in span) / sum(n for _, n in span) - 1.0) for span in spans]
    assert said["sum_error_256"] == pytest.approx(sum(errors) / 4)
    assert sum(errors) / 4 < 0.12


def test_calibration_without_answers_says_nothing() -> None:
    predictor = LengthPredictor()
    predictor.observe(request(), 100)  # it ended, but no length was asked for it
    assert predictor.calibration() == {"coverage_p50": None, "coverage_p90": None, "sum_error_256": None, "count": 0.0}


def test_a_prediction_is_judged_as_it_was_made_and_once() -> None:
    predictor = LengthPredictor()
    for number in range(50):
        predictor.observe(request(number), 10)
    predictor.predict(request(100))
    for number in range(50):
        predictor.observe(request(number), 2000)
    predictor.observe(request(100), 1000)
    predictor.observe(request(100), 1)
    said = predictor.calibration()
    assert (said["coverage_p90"], said["count"]) == (0.0, 1.0)


def test_the_rest_of_an_answer_is_predicted_from_those_that_were_longer() -> None:
    predictor, rng = LengthPredictor(), random.Random(3)
    learn(predictor, 2000, lambda number: (request(number), two_peaks(rng)))
    rest = predictor.predict(request(prompt=700, limit=LIMIT - 200, answered_tokens=200))
    assert rest.mean == pytest.approx(210, rel=0.1), "those that are longer have some 410"
    past_all = predictor.predict(request(prompt=3500, limit=LIMIT - 3000, answered_tokens=3000))
    assert past_all == Length(LIMIT - 3000, LIMIT - 3000, float(LIMIT - 3000)), "none was so long"


def test_the_whole_of_an_answer_in_parts_is_learned() -> None:
    predictor = LengthPredictor()
    learn(predictor, 100, lambda number: (request(number, 500 + 300, LIMIT - 300, answered_tokens=300), 100))
    assert predictor.predict(request()).mean == pytest.approx(400, rel=0.05)


def test_memory_is_bounded_whoever_asks() -> None:
    predictor = LengthPredictor(max_cells=50, max_pending=20)
    for number in range(500):
        asked = request(number, client=f"c{number}", affinity=f"a{number}", prompt=number + 1)
        predictor.predict(asked)
        if number % 2:
            predictor.observe(asked, 5)
    assert len(predictor) == 50
    assert len(predictor._pending) <= 20
    assert predictor.predict(request(prompt=7)).p50 <= 6  # what everybody shares is not what went


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 5_000_000), st.booleans(), st.integers(1, 5000)), max_size=120),
    st.integers(1, 10_000),
)
def test_no_prediction_is_above_the_limit_or_out_of_order(ends: list[tuple[int, bool, int]], limit: int) -> None:
    predictor = LengthPredictor(enough=1)
    for number, (tokens, is_cut, prompt) in enumerate(ends):
        asked = request(number, prompt=prompt, limit=limit)
        length = predictor.predict(asked)
        assert 1 <= length.p50 <= length.p90 <= limit
        assert 0.0 < length.mean <= limit
        predictor.observe(asked, tokens, is_cut)


def test_many_answers_do_not_overflow_what_fades() -> None:
    predictor = LengthPredictor(memory=4, enough=2)
    for number in range(1000):
        predictor.observe(request(number), 50)
    cell = predictor._cells[("all",)]
    assert 3 < cell.count < 6
    assert cell.counts.shape == (BUCKETS,)
    assert predictor.predict(request()).p50 in range(47, 54)
