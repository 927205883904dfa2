"""Which request is refused after engines have crashed."""

from __future__ import annotations

from deployments.policy.admission.poison import POISON, REFUSED_S, REMEMBERED_S, Poison

BAD, ONE, OTHER = 1, 2, 3


def refused(poison: Poison, now_s: float) -> set[int]:
    return {digest for digest in (BAD, ONE, OTHER) if poison.refusal(digest, now_s) is not None}


def test_the_one_request_that_two_crashes_have_in_common_is_refused_for_a_while() -> None:
    poison = Poison()
    poison.crashed("a", [BAD, ONE], 0.0)
    assert refused(poison, 1.0) == set()
    poison.crashed("b", [BAD, OTHER], 1.0)
    assert refused(poison, 1.0) == {BAD}
    refusal = poison.refusal(BAD, 1.0)
    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s, refusal.unavailable) == (POISON, None, False)
    assert refused(poison, 1.0 + REFUSED_S) == set()


def test_of_several_in_common_none_is_refused_until_they_part() -> None:
    poison = Poison()
    poison.crashed("a", [BAD, ONE], 0.0)
    poison.crashed("b", [BAD, ONE], 1.0)
    assert refused(poison, 1.0) == set()
    poison.crashed("c", [BAD], 2.0)
    assert refused(poison, 2.0) == {BAD}


def test_a_crash_counts_once_however_many_tell_of_it() -> None:
    poison = Poison()
    poison.crashed("a", [BAD, ONE], 0.0)
    poison.crashed("a", [BAD], 0.1)
    assert refused(poison, 0.1) == set()


def test_crashes_long_apart_are_not_compared() -> None:
    poison = Poison()
    poison.crashed("a", [BAD], 0.0)
    poison.crashed("b", [BAD], REMEMBERED_S)
    assert refused(poison, REMEMBERED_S) == set()
