"""A replica on which sessions are lost is left alone, then tried with one session."""

from __future__ import annotations

from deployments.policy.admission.breakers import FIRST_S, LONGEST_S, Breakers


def is_shut(breakers: Breakers, now_s: float) -> bool:
    return "r" in breakers.shut(now_s)


def test_each_loss_shuts_it_for_twice_as_long() -> None:
    breakers, now_s, span_s = Breakers(), 0.0, FIRST_S
    for _ in range(12):
        breakers.lost("r", now_s)
        assert breakers.shut(now_s) == {"r": span_s}
        breakers.lost("r", now_s + span_s / 2)  # of a session from before
        assert is_shut(breakers, now_s + 0.99 * span_s)
        now_s += span_s
        assert not is_shut(breakers, now_s)
        span_s = min(2 * span_s, LONGEST_S)
    assert span_s == LONGEST_S


def test_half_open_it_takes_one_session_until_that_ends_well() -> None:
    breakers = Breakers()
    breakers.lost("r", 0.0)
    assert not is_shut(breakers, FIRST_S)
    breakers.placed("r", FIRST_S)
    assert is_shut(breakers, FIRST_S)
    breakers.succeeded("r")
    assert not breakers
    breakers.lost("r", 1.0)
    assert breakers.shut(1.0) == {"r": FIRST_S}, "what was before is forgotten"


def test_a_probe_that_tells_nothing_is_followed_by_another() -> None:
    breakers = Breakers()
    breakers.lost("r", 0.0)
    breakers.placed("r", 1.0)
    assert is_shut(breakers, 1.0 + 0.9 * FIRST_S)
    assert not is_shut(breakers, 1.0 + FIRST_S)


def test_a_probe_that_is_lost_shuts_it_again() -> None:
    breakers = Breakers()
    breakers.lost("r", 0.0)
    breakers.placed("r", 1.0)
    breakers.lost("r", 1.1)
    assert breakers.shut(1.1) == {"r": 2 * FIRST_S}


def test_the_end_of_a_session_from_before_opens_nothing() -> None:
    breakers = Breakers()
    breakers.lost("r", 0.0)
    breakers.succeeded("r")
    assert is_shut(breakers, 0.1)


def test_one_that_serve_has_taken_out_is_shut_for_long_and_then_forgotten() -> None:
    breakers = Breakers()
    breakers.lost("r", 0.0)
    breakers.lost("r", 0.1, gone=True)
    assert is_shut(breakers, LONGEST_S)
    assert not is_shut(breakers, 0.1 + LONGEST_S)
    breakers.shut(10 * LONGEST_S)
    assert not breakers
