"""The queue of one class: clients share turns by tokens, and a client's own requests keep their order."""

from __future__ import annotations

from deployments.messages import SessionRequest
from deployments.policy.admission.classes import PriorityClass
from deployments.policy.admission.fair_queue import Line, Waiter

CLASS = PriorityClass("default")


def waiter(number: int, client: str, tokens: float = 100.0, target_s: float = 0.0) -> Waiter:
    request = SessionRequest(f"{client}{number}", 10, 10, client=client)
    return Waiter(request, CLASS, number, 0.0, target_s or float(number), tokens)


def line_of(*waiters: Waiter) -> Line:
    line = Line(CLASS)
    for each in waiters:
        line.join(each)
    return line


def order(line: Line) -> list[str]:
    return [each.request.session_id for each in line.in_order()]


def test_a_client_with_many_requests_does_not_hold_up_another() -> None:
    line = line_of(*(waiter(number, "a") for number in range(1, 5)), waiter(5, "b"))
    assert order(line) == ["a1", "b5", "a2", "a3", "a4"]
    assert line.ahead_of("b") == 3
    assert line.ahead_of("new") == 2
    assert [each.number for each in line.newest()] == [5, 4, 3, 2, 1]


def test_served_tokens_count_against_their_client_and_being_away_earns_nothing() -> None:
    first = waiter(1, "a", tokens=500.0)
    line = line_of(first, waiter(2, "a"), waiter(3, "b"))
    line.remove(first, served=True)
    assert order(line) == ["b3", "a2"]
    line.join(waiter(4, "c", tokens=50.0))
    assert order(line) == ["b3", "c4", "a2"], "c starts at what was served, not at nothing"


def test_targets_are_counted_and_forgotten_with_their_requests() -> None:
    late = waiter(2, "a", target_s=20.0)
    line = line_of(waiter(1, "a", target_s=10.0), late)
    assert line.due_within(5.0, 25.0) == 2
    line.remove(late)
    assert (line.due_within(5.0, 25.0), len(line)) == (1, 1)
