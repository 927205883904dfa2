"""What is left of answers: by the placement policy's predictor, corrected while they are written."""

from __future__ import annotations

import random

from deployments.policy.temporal.lengths import AnswerLengths, Job


def learned(tokens: list[int]) -> AnswerLengths:
    lengths = AnswerLengths()
    for number, each in enumerate(tokens):
        lengths.ended(Job(f"s{number}", 500, 2048), each, by_limit=False)
    return lengths


NEW = Job("new", 500, 2048)


def test_before_any_answer_the_limit_is_expected() -> None:
    assert AnswerLengths().left(NEW, 0) == 2048
    assert AnswerLengths().left(NEW, 48) == 2000


def test_what_is_left_is_of_the_answers_that_were_longer() -> None:
    """Half of the answers have 100 tokens and half have 1,000: behind 100, only the long ones count."""
    rng = random.Random(1)
    lengths = learned([rng.choice((100, 1000)) for _ in range(200)])
    assert 400 < lengths.left(NEW, 0) < 700
    assert 730 < lengths.left(NEW, 200) < 880
    assert lengths.left(NEW, 2048) == 1, "it has all that it may have"


def test_an_answer_counts_at_a_point_with_the_chance_that_it_is_not_over_before() -> None:
    rng = random.Random(1)
    lengths = learned([rng.choice((100, 1000)) for _ in range(400)])
    counts, most = lengths.outlook(NEW, 0)
    assert most == 2048
    assert counts[:3].tolist() == [1.0] * 3, "nothing ends in 64 tokens"
    assert 0.4 < counts[4] < 0.6, "at 160 tokens half is over: they count at 128, the point after their end"
    assert 0.4 < counts[29] < 0.6
    assert lengths.outlook(NEW, 200).counts[:20].tolist() == [1.0] * 20, "only long ones are left"
    assert lengths.outlook(NEW, 2040).counts[:2].tolist() == [1.0, 0.0], "eight tokens are left of its limit"


def test_before_any_answer_it_counts_to_its_limit() -> None:
    assert AnswerLengths().outlook(Job("a", 10, 70), 0).counts.sum() == 3


def test_an_answer_longer_than_any_seen_may_become_as_long_as_it_may_be() -> None:
    assert learned([100] * 200).left(NEW, 1000) == 1048


def test_an_answer_in_its_second_half_is_compared_with_whole_answers() -> None:
    """The prompt of the comparison is the request's own, not the prompt with what was written."""
    lengths = AnswerLengths()
    for number in range(100):
        lengths.ended(Job(f"short-{number}", 500, 2048), 300, by_limit=False)
        lengths.ended(Job(f"long-{number}", 1000, 2048), 1500, by_limit=False)
    assert lengths.left(NEW, 280) < 40
