"""What follows a placement that came to nothing: how often, after which pause, and with which error in the end."""

from __future__ import annotations

import pytest

from deployments.cluster.recovery import Again, Fail, Limits, Recovery
from deployments.cluster.timings import Timings
from deployments.errors import EngineFault, HandoffFailed, Moved, ReplicaLost, SessionError

LOST, MOVED = ReplicaLost("its engine died"), Moved("decode-0 gave it up")
TIMINGS = Timings(pause_s=0.1, longest_pause_s=0.3)
ROW, ALL = ", and so in each of {} placements", ", the last of {} placements"
RULE = "; what was answered so far cannot go on elsewhere (stateful_logits)"

Event = tuple[SessionError, bool]
"""Why a placement ended, and whether it gave more than a first token."""
NOTHING, TOKENS, MOVE = (LOST, False), (LOST, True), (MOVED, True)
FAULT = (EngineFault("the decode engine could not go on"), False)
AT_ONCE, MOVES_ON = Again("", 0.0), Again("decode-0", 0.0)


def ended(recovery: Recovery, event: Event, answered: bool = True, rule: str = "") -> Again | str:
    """What follows; of a failure its text, which ends with the reason why the session is not placed again."""
    error, progressed = event
    match recovery.ended(error, progressed, answered, rule, "decode-0" if error is MOVED else ""):
        case Fail(final):
            assert type(final) is type(error)
            return str(final).removeprefix(str(error))
        case again:
            return again


@pytest.mark.parametrize(
    ("limits", "events", "expected"),
    [
        # One loss is placed again at once, and what was lost last in a row of losses ends the session.
        (Limits(1), [NOTHING], [""]),
        (Limits(2), [NOTHING, NOTHING], [AT_ONCE, ROW.format(2)]),
        # The pauses begin before the third placement, double, and have a bound.
        (
            Limits(6),
            [NOTHING] * 6,
            [AT_ONCE, Again("", 0.1), Again("", 0.2), Again("", 0.3), Again("", 0.3), ROW.format(6)],
        ),
        # A placement that gave tokens begins a new row, and is the first loss of it.
        (Limits(2), [TOKENS, TOKENS, TOKENS, NOTHING], [AT_ONCE, AT_ONCE, AT_ONCE, ROW.format(2)]),
        (Limits(3), [NOTHING, NOTHING, TOKENS, NOTHING], [AT_ONCE, Again("", 0.1), AT_ONCE, Again("", 0.1)]),
        # All placements of a session are counted too, moves apart.
        (Limits(2, placements=3), [TOKENS] * 3, [AT_ONCE, AT_ONCE, ALL.format(3)]),
        (Limits(2, placements=2), [TOKENS, MOVE, TOKENS], [AT_ONCE, MOVES_ON, ALL.format(3)]),
        # A move is no loss: it neither begins nor ends a row.
        (Limits(2), [MOVE, MOVE, MOVE], [MOVES_ON] * 3),
        (Limits(2), [NOTHING, MOVE, NOTHING], [AT_ONCE, MOVES_ON, ROW.format(2)]),
        # A further move than the limit allows is a loss: its replica hands nothing over.
        (Limits(2, moves=1), [MOVE, MOVE, NOTHING], [MOVES_ON, AT_ONCE, ROW.format(2)]),
        (Limits(1, moves=0), [MOVE], [""]),
        # An engine's own error is tried in one other engine. After that the request counts as its cause.
        (Limits(4), [FAULT, FAULT], [AT_ONCE, ", and so in 2 engines"]),
        (Limits(4), [FAULT, TOKENS, FAULT], [AT_ONCE, AT_ONCE, ", and so in 2 engines"]),
    ],
)
def test_what_follows(limits: Limits, events: list[Event], expected: list[Again | str]) -> None:
    recovery = Recovery(limits, TIMINGS)
    assert [ended(recovery, event) for event in events] == expected


@pytest.mark.parametrize(
    ("event", "answered", "expected"),
    [
        (NOTHING, False, AT_ONCE),  # nothing was answered: the request can be placed anywhere
        (NOTHING, True, RULE),
        (TOKENS, True, RULE),
        (MOVE, True, MOVES_ON),  # its KV cache and the state beside it go along
    ],
)
def test_an_answer_that_cannot_go_on_elsewhere(event: Event, answered: bool, expected: Again | str) -> None:
    assert ended(Recovery(Limits(), TIMINGS), event, answered, "stateful_logits") == expected


def test_the_last_loss_of_a_row_is_the_reason_before_any_other() -> None:
    assert ended(Recovery(Limits(1, placements=1), TIMINGS), NOTHING, rule="stateful_logits") == ""
    assert ended(Recovery(Limits(2, placements=1), TIMINGS), NOTHING, rule="stateful_logits") == ALL.format(1)


def test_the_error_keeps_its_kind() -> None:
    match Recovery(Limits(1), TIMINGS).ended(HandoffFailed("the KV cache did not come"), False, False, "", ""):
        case Fail(error):
            assert type(error) is HandoffFailed
            assert str(error) == "the KV cache did not come"
        case again:
            pytest.fail(f"{again}")
