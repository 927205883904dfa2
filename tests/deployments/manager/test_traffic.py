"""What becomes of sessions, for the trace. A session is one line, also where it is lost, moved or placed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.manager.traffic import FOLLOWED_S, UNFINISHED, Line, Traffic
from deployments.messages import MANAGER_RETIRES, Admit, Mode, Placement, Reject, ReplicaInfo, Role, SessionRequest

REPLICA = ReplicaInfo("d0", "decode-main", Role.DECODE, "node", "engine", 16, 100, 8, 2048)
ASKED = SessionRequest("a", 100, 50, hashes=(7, 8), client="somebody")


def admit(epoch: int, session_id: str = "a") -> Admit:
    return Admit(Placement(session_id, epoch, Mode.DECODE_LOCAL, "short", REPLICA, None, 10, 7.0, 70.0))


class Told:
    """Traffic, and its lines."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.traffic = Traffic(self.lines.append, "standard")
        self.traffic.opened(ASKED, 5.0)

    def ends(self) -> list[tuple[str, int]]:
        return [(line.outcome, line.output_tokens) for line in self.lines]


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_answered_session_is_a_line_with_its_arrival_lengths_blocks_and_class(told: Told) -> None:
    told.traffic.decided("a", admit(1))
    told.traffic.closed("a", "stop", 9.0, 1, 20)
    assert told.lines == [Line(5.0, 100, 20, 50, (7, 8), "standard", "stop")]
    assert not len(told.traffic)


def test_what_ends_twice_is_one_line(told: Told) -> None:
    told.traffic.decided("a", admit(1))
    for outcome in ("stop", "stop", "orphaned", "expired"):
        told.traffic.closed("a", outcome, 9.0, 1, 20)
    told.traffic.sweep(1e6)
    assert told.ends() == [("stop", 20)]


@pytest.mark.parametrize("outcome", ["moved", "lost"])
def test_a_session_that_goes_on_elsewhere_is_one_line_with_its_whole_answer(told: Told, outcome: str) -> None:
    told.traffic.decided("a", admit(1))
    told.traffic.closed("a", outcome, 6.0, 1, 12)
    told.traffic.opened(replace(ASKED, prompt_tokens=112, attempt=2, answered_tokens=12), 6.1)
    told.traffic.sweep(6.1 + 2 * FOLLOWED_S)
    told.traffic.decided("a", admit(2))
    told.traffic.closed("a", "length", 9.0, 2, 38)
    assert told.ends() == [("length", 50)]
    assert (told.lines[0].at_s, told.lines[0].prompt_tokens) == (5.0, 100)


def test_the_end_of_an_old_placement_that_comes_late_does_not_end_the_session(told: Told) -> None:
    told.traffic.decided("a", admit(1))
    told.traffic.opened(replace(ASKED, attempt=2, answered_tokens=12), 6.0)
    told.traffic.decided("a", admit(2))
    told.traffic.closed("a", "failed", 6.1, 1, 12)
    told.traffic.closed("a", "stop", 9.0, 2, 3)
    assert told.ends() == [("stop", 15)]


def test_an_answer_counts_once_where_the_end_of_its_first_part_is_told_late(told: Told) -> None:
    told.traffic.decided("a", admit(1))
    told.traffic.opened(replace(ASKED, attempt=2, answered_tokens=12), 6.0)
    told.traffic.closed("a", "moved", 6.1, 1, 12)
    told.traffic.end()
    assert told.ends() == [(UNFINISHED, 12)]


def test_a_class_that_is_not_configured_is_the_clients_text_and_not_written() -> None:
    lines: list[Line] = []
    traffic = Traffic(lines.append, "standard")
    traffic.opened(replace(ASKED, priority="my secret"), 5.0)
    traffic.decided("a", Reject("no class my secret", code="unknown_class"))
    assert lines == [Line(5.0, 100, 0, 50, (7, 8), "", "refused:unknown_class")]


def test_a_lost_session_that_nothing_follows_is_written_after_a_while(told: Told) -> None:
    told.traffic.decided("a", admit(1))
    told.traffic.closed("a", "lost", 6.0, 1, 12)
    told.traffic.sweep(6.0 + FOLLOWED_S)
    assert told.lines == []
    told.traffic.sweep(6.1 + FOLLOWED_S)
    assert told.ends() == [("lost", 12)]


@pytest.mark.parametrize(("code", "outcome"), [("predicted_ttft", "refused:predicted_ttft"), ("", "refused")])
def test_a_refused_session_is_a_line_too(told: Told, code: str, outcome: str) -> None:
    told.traffic.decided("a", Reject("too late", 1.0, code=code))
    told.traffic.closed("a", "failed", 6.0)  # the ingress withdraws it
    assert told.ends() == [(outcome, 0)]


def test_a_session_that_is_refused_on_the_way_keeps_what_was_answered(told: Told) -> None:
    told.traffic.decided("a", admit(1))
    told.traffic.closed("a", "lost", 6.0, 1, 12)
    told.traffic.opened(replace(ASKED, attempt=2, answered_tokens=12), 6.1)
    told.traffic.decided("a", Reject("too many", 1.0, code="retry_budget"))
    assert told.ends() == [("refused:retry_budget", 12)]


def test_a_session_that_is_sent_to_another_manager_is_that_ones(told: Told) -> None:
    told.traffic.decided("a", Reject("ask again", 0.2, code=MANAGER_RETIRES))
    told.traffic.end()
    assert told.lines == []


def test_what_is_open_when_the_manager_ends_is_written(told: Told) -> None:
    told.traffic.decided("a", admit(1))
    told.traffic.end()
    assert told.ends() == [(UNFINISHED, 0)]
    assert not len(told.traffic)


def test_sessions_that_another_manager_placed_first_are_left_out() -> None:
    lines: list[Line] = []
    traffic = Traffic(lines.append)
    traffic.opened(replace(ASKED, attempt=2), 1.0)
    traffic.closed("a", "stop", 2.0, 1, 5)
    assert lines == []


def test_without_a_trace_nothing_is_kept() -> None:
    traffic = Traffic()
    traffic.opened(ASKED, 1.0)
    assert not len(traffic)
