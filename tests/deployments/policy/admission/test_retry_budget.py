"""How many sessions may be placed again."""

from __future__ import annotations

from deployments.policy.admission.retry_budget import LEAST, WINDOW_S, RetryBudget


def taken(budget: RetryBudget, now_s: float, open_sessions: int = 0, tries: int = 1000) -> int:
    return sum(budget.take(now_s, open_sessions) for _ in range(tries))


def test_a_quiet_cluster_may_try_a_few() -> None:
    budget = RetryBudget()
    assert taken(budget, 0.0) == LEAST
    assert taken(budget, WINDOW_S - 0.1) == 0
    assert taken(budget, WINDOW_S) == LEAST


def test_all_open_sessions_may_move_at_once_but_not_again_and_again() -> None:
    budget = RetryBudget()
    assert taken(budget, 0.0, open_sessions=200) == 200 + LEAST
    assert taken(budget, 1.0, open_sessions=200) == 0


def test_no_more_come_again_than_came_first() -> None:
    budget = RetryBudget()
    for number in range(100):
        budget.opened(number * 0.05)
    assert taken(budget, 5.0) == 100 + LEAST
    assert taken(budget, 5.0 + WINDOW_S) == LEAST, "the first ones are long ago"
