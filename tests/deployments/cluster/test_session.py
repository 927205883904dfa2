"""One session's life: what is legal when, what reaches the client in what order, and that it ends once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.cluster.session import (
    ALLOWED,
    Deliver,
    Effect,
    EndPrefill,
    Fail,
    Finish,
    IllegalEvent,
    Over,
    PrefillOver,
    Session,
    StartDecode,
    State,
)
from deployments.errors import (
    EngineFault,
    HandoffFailed,
    Moved,
    ReplicaLost,
    RequestFault,
    SessionError,
    SessionTimeout,
)
from deployments.messages import MOVED, Handoff, Mode, Role

P, D = Role.PREFILL, Role.DECODE
LOCAL = {Mode.DECODE_LOCAL: D, Mode.PREFILL_LOCAL: P}
TIMEOUT = SessionTimeout("too late")
Event = Callable[[Session], list[Effect]]
ENDED = (State.LOST, State.FOLLOWED, State.OVER, State.CLOSED)


def placed(mode: Mode) -> Event:
    return lambda session: session.placed(mode)


def output(role: Role, name: Any = "output", finish: Finish | None = None) -> Event:
    return lambda session: session.output(role, name, finish)


def reported(role: Role, outcome: str = "finished") -> Event:
    return lambda session: session.reported(role, outcome)


def gone(role: Role) -> Event:
    return lambda session: session.replica_lost(role, "its engine died")


def failed(session: Session) -> list[Effect]:
    return session.failed(TIMEOUT)


def lost(session: Session) -> list[Effect]:
    return session.lost(ReplicaLost("unknown cause"))


def pulled(session: Session) -> list[Effect]:
    session.handoff = Handoff.PULLED
    return session.placed(Mode.DISAGGREGATED)


SPLIT = placed(Mode.DISAGGREGATED)
FIRST = output(P, "first", Finish.LENGTH)

# Every state, with the events that lead there.
WAYS: dict[str, tuple[State, list[Event]]] = {
    "opening": (State.OPENING, []),
    "split": (State.PREFILLING, [SPLIT]),
    "split, decode ahead": (State.PREFILLING, [SPLIT, output(D, "early")]),
    "split, decode all ahead": (State.PREFILLING, [SPLIT, output(D, "early", Finish.LENGTH)]),
    "split, landing": (State.LANDING, [SPLIT, FIRST]),
    "split, decoding": (State.DECODING, [SPLIT, FIRST, output(D, "second")]),
    "pulled": (State.PREFILLING, [pulled]),
    "pulled, prefilled": (State.PULLING, [pulled, FIRST]),
    "pulled, decoding": (State.DECODING, [pulled, FIRST, output(D, "first")]),
    "decode local": (State.PREFILLING, [placed(Mode.DECODE_LOCAL)]),
    "decode local, begun": (State.DECODING, [placed(Mode.DECODE_LOCAL), output(D)]),
    "prefill local": (State.DECODING, [placed(Mode.PREFILL_LOCAL), output(P)]),
    "answered": (State.OVER, [SPLIT, FIRST, output(D, "last", Finish.LENGTH)]),
    "failed": (State.OVER, [SPLIT, failed]),
    "lost": (State.LOST, [SPLIT, lost]),
    "moved": (State.LOST, [SPLIT, FIRST, output(D, "second"), reported(D, MOVED)]),
    "lost, then failed": (State.OVER, [SPLIT, lost, failed]),
    "lost, then cancelled": (State.OVER, [SPLIT, lost, Session.cancelled]),
    "followed": (State.FOLLOWED, [SPLIT, lost, Session.followed]),
    "interrupted": (State.OVER, [SPLIT, Session.interrupted]),
    "cancelled in the queue": (State.OVER, [Session.cancelled]),
    "answered and closed": (State.CLOSED, [placed(Mode.DECODE_LOCAL), output(D, "all", Finish.STOP), Session.closed]),
    "followed and closed": (State.CLOSED, [SPLIT, lost, Session.followed, Session.closed]),
}
EVENTS: dict[str, tuple[str, Event]] = {
    **{f"placed {mode}": ("placed", placed(mode)) for mode in Mode},
    **{
        f"{role} output {finish}": ("output", output(role, finish=finish))
        for role in (P, D)
        for finish in (None, *Finish)
    },
    **{
        f"{role} reported {how}": ("reported", reported(role, how))
        for role in (P, D)
        for how in ("finished", "expired", MOVED)
    },
    **{f"{role} replica lost": ("replica_lost", gone(role)) for role in (P, D)},
    "interrupted": ("interrupted", Session.interrupted),
    "followed": ("followed", Session.followed),
    "closed": ("closed", Session.closed),
    "lost": ("lost", lost),
    "failed": ("failed", failed),
    "cancelled": ("cancelled", Session.cancelled),
}


def run(events: Iterable[Event], session: Session | None = None) -> list[Effect]:
    session = session or Session("s")
    return [effect for event in events for effect in event(session)]


UNHEARD = [
    *(("split", P), ("split", D), ("split, decode ahead", P), ("split, decode ahead", D)),
    *(("split, decode all ahead", P), ("split, landing", D), ("split, decoding", D)),
    *(("pulled", P), ("pulled", D), ("pulled, prefilled", D), ("pulled, decoding", D)),
    *(("decode local", D), ("decode local, begun", D), ("prefill local", P)),
]
"""The session still waits for something of this replica."""


GOES_ON = [("split, decoding", D), ("pulled, decoding", D), ("decode local, begun", D), ("prefill local", P)]


def after(way: str) -> Session:
    state, events = WAYS[way]
    session = Session("s")
    run(events, session)
    assert session.state is state
    return session


def copied(session: Session) -> Session:
    """Its error stays the same object: errors are equal to themselves alone."""
    return replace(session, held=list(session.held))


def names(effects: list[Effect]) -> list[Any]:
    return [effect.output for effect in effects if isinstance(effect, Deliver)]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_event_in_every_state_is_legal_or_changes_nothing(way: str, event: str) -> None:
    session = after(way)
    before = copied(session)
    kind, act = EVENTS[event]
    if before.state in ALLOWED[kind]:
        act(session)
        return
    with pytest.raises(IllegalEvent, match=f"session s: {kind} while {before.state}"):
        act(session)
    assert session == before


def test_the_table_names_every_event() -> None:
    assert {kind for kind, _ in EVENTS.values()} == set(ALLOWED)
    assert {state for state, _ in WAYS.values()} == set(State)
    assert ALLOWED["placed"] == {State.OPENING}
    assert all(State.OPENING not in ALLOWED[kind] for kind in ("output", "reported", "replica_lost", "lost"))


STRICT = ("placed", "followed", "closed")
"""These events are an error when they come at the wrong time. A late one of the others changes nothing."""


@pytest.mark.parametrize("event", [event for event, (kind, _) in EVENTS.items() if kind not in STRICT])
@pytest.mark.parametrize("way", [way for way, (state, _) in WAYS.items() if state in ENDED])
def test_an_event_after_the_end_does_nothing(way: str, event: str) -> None:
    """A lost placement can still be failed or cancelled; and the owner may say after the end that it holds nothing."""
    session = after(way)
    before = copied(session)
    effects = EVENTS[event][1](session)
    if before.state is State.LOST and event in ("failed", "cancelled", "interrupted"):
        assert effects == ([Fail(TIMEOUT)] if event == "failed" else [])
        assert session.state is State.OVER
        assert session.outcome == before.outcome, "what the placement came to"
        return
    assert effects == []
    if before.state is State.CLOSED:
        assert session == before
    assert replace(session, owner_ended=before.owner_ended) == before


def test_the_next_placement_takes_over_before_the_lost_one_is_closed() -> None:
    session = after("lost")
    with pytest.raises(IllegalEvent, match="closed while lost"):
        session.closed()
    assert session.followed() == []
    with pytest.raises(IllegalEvent, match="followed while followed"):
        session.followed()
    assert (session.failed(TIMEOUT), session.cancelled()) == ([], []), "the client hears of the other one"
    assert session.closed() == []
    with pytest.raises(IllegalEvent, match="closed while closed"):
        session.closed()


@pytest.mark.parametrize("way", [way for way, (state, _) in WAYS.items() if state not in ENDED])
def test_what_still_runs_is_neither_followed_nor_closed(way: str) -> None:
    for event in (Session.followed, Session.closed):
        with pytest.raises(IllegalEvent):
            event(after(way))


@pytest.mark.parametrize(
    ("mode", "events", "owner_ended"),
    [
        (Mode.DISAGGREGATED, [FIRST, reported(P)], False),
        (Mode.DISAGGREGATED, [FIRST, reported(D)], True),
        (Mode.DISAGGREGATED, [output(D, "early", Finish.LENGTH)], True),
        (Mode.DISAGGREGATED, [gone(D)], False),
        (Mode.DISAGGREGATED, [Session.cancelled, reported(D, "expired")], True),
        (Mode.DECODE_LOCAL, [output(D, "all", Finish.STOP)], True),
        (Mode.DECODE_LOCAL, [output(D, "first")], False),
        (Mode.PREFILL_LOCAL, [output(P, "all", Finish.STOP)], True),
        (Mode.PREFILL_LOCAL, [reported(P, MOVED)], True),
    ],
)
def test_the_owner_says_that_it_holds_nothing(mode: Mode, events: list[Event], owner_ended: bool) -> None:
    session = Session("s")
    run([placed(mode), *events], session)
    assert session.owner_ended == owner_ended


@pytest.mark.parametrize(("way", "role"), [("split, decoding", D), ("decode local, begun", D), ("prefill local", P)])
def test_a_session_that_its_replica_gives_up(way: str, role: Role) -> None:
    session = after(way)
    assert session.reported(role, MOVED) == [Over(MOVED)]
    assert (session.state, type(session.error)) == (State.LOST, Moved)


def test_a_split_session() -> None:
    session = Session("s")
    assert session.placed(Mode.DISAGGREGATED) == []
    first = session.output(P, "first", Finish.LENGTH)
    assert first == [Deliver("first", finish=False), PrefillOver()], "its length is not the answer's"
    assert session.reported(P, "finished") == []
    assert session.output(D, "second", None) == [Deliver("second", finish=False)]
    last = session.output(D, "third", Finish.LENGTH)
    assert last == [Deliver("third", finish=True), Over("length")]
    assert session.reported(D, "finished") == []


@pytest.mark.parametrize(("mode", "role"), LOCAL.items())
@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.STOP])
def test_a_session_on_one_replica(mode: Mode, role: Role, finish: Finish) -> None:
    effects = run([placed(mode), output(role, 1), output(role, 2), output(role, 3, finish), reported(role)])
    assert effects == [Deliver(1, False), PrefillOver(), Deliver(2, False), Deliver(3, True), Over(str(finish))]


@pytest.mark.parametrize(("mode", "role"), LOCAL.items())
def test_one_output_that_is_the_whole_answer_ends_the_prefill_by_closing(mode: Mode, role: Role) -> None:
    assert run([placed(mode), output(role, 1, Finish.STOP)]) == [Deliver(1, True), Over("stop")]


def test_a_pulled_session() -> None:
    """Prefill's output starts decode and is not delivered; decode's first says that it has the KV cache."""
    session = Session("s", Handoff.PULLED)
    assert session.placed(Mode.DISAGGREGATED) == []
    assert session.output(P, "where", Finish.LENGTH) == [PrefillOver(), StartDecode("where")]
    assert session.output(D, "first", None) == [EndPrefill(), Deliver("first", finish=False)]
    assert session.output(D, "second", None) == [Deliver("second", finish=False)]
    assert session.output(D, "third", Finish.LENGTH) == [Deliver("third", finish=True), Over("length")]


def test_prefills_token_does_not_end_a_pulled_answer_but_decodes_first_can() -> None:
    session = after("pulled")
    assert session.output(P, "a stop token", Finish.STOP) == [PrefillOver(), StartDecode("a stop token")]
    effects = session.output(D, "a stop token", Finish.STOP)
    assert effects == [EndPrefill(), Deliver("a stop token", finish=True), Over("stop")]


@pytest.mark.parametrize("mode", LOCAL)
def test_a_session_on_one_replica_has_no_handoff_to_pull(mode: Mode) -> None:
    session = Session("s", Handoff.PULLED)
    effects = run([placed(mode), output(LOCAL[mode], 1), output(LOCAL[mode], 2, Finish.LENGTH)], session)
    assert effects == [Deliver(1, False), PrefillOver(), Deliver(2, True), Over("length")]


def test_decode_outputs_that_overtake_prefill_are_held_and_come_in_order() -> None:
    session = after("split")
    assert run([output(D, 2), output(D, 3), output(D, 4, Finish.STOP), reported(D)], session) == []
    effects = session.output(P, 1, Finish.LENGTH)
    assert effects == [
        Deliver(1, False),
        PrefillOver(),
        Deliver(2, False),
        Deliver(3, False),
        Deliver(4, True),
        Over("stop"),
    ]


def test_what_was_held_behind_the_last_output_is_dropped() -> None:
    effects = run([SPLIT, output(D, 2, Finish.LENGTH), output(D, 2, Finish.LENGTH), output(D, 3), FIRST])
    assert names(effects) == ["first", 2]
    assert effects[-1] == Over("length")
    assert sum(isinstance(effect, Over) for effect in effects) == 1


@pytest.mark.parametrize("way", ["split", "split, decode ahead", "split, decode all ahead"])
def test_the_first_token_can_be_the_last(way: str) -> None:
    effects = after(way).output(P, "first", Finish.STOP)
    assert effects == [Deliver("first", finish=True), Over("stop")]


@pytest.mark.parametrize("way", ["split, landing", "split, decoding", "pulled, decoding"])
def test_prefill_has_nothing_to_say_after_its_first_token(way: str) -> None:
    session = after(way)
    before = copied(session)
    for finish in (None, *Finish):
        assert session.output(P, "again", finish) == []
    if way != "split, landing":
        assert session.replica_lost(P, "its engine died") == []
    assert session == before


@pytest.mark.parametrize(
    ("way", "role", "error"),
    [
        ("split", P, EngineFault),
        ("split", D, HandoffFailed),
        ("split, decode ahead", D, HandoffFailed),
        ("split, landing", D, HandoffFailed),
        ("split, decoding", D, EngineFault),
        ("pulled", P, EngineFault),
        ("pulled, prefilled", D, HandoffFailed),
        ("decode local", D, EngineFault),
        ("prefill local", P, EngineFault),
    ],
)
def test_an_error_from_an_engine_loses_the_placement(way: str, role: Role, error: type[SessionError]) -> None:
    session = after(way)
    assert session.output(role, "dropped", Finish.ERROR) == [Over("lost")]
    assert session.state is State.LOST
    assert type(session.error) is error
    assert str(session.error) == f"the {role} engine could not go on with the request"


@pytest.mark.parametrize(("way", "role"), [("split", P), ("split", D), ("split, decoding", D), ("decode local", D)])
def test_a_request_that_an_engine_refuses_fails_at_once(way: str, role: Role) -> None:
    session = after(way)
    fail, over = session.output(role, "dropped", Finish.ERROR, "the grammar cannot be used")
    assert isinstance(fail, Fail)
    assert (type(fail.error), str(fail.error)) == (RequestFault, "the grammar cannot be used")
    assert over == Over("failed")
    assert session.output(role, "again", Finish.ERROR, "the same") == []


LIVING = [
    ("split", P),
    ("split", D),
    ("split, decode all ahead", P),
    ("split, landing", P),
    ("split, landing", D),
    ("split, decoding", D),
    ("pulled", P),
    ("pulled, prefilled", P),
    ("pulled, prefilled", D),
    ("pulled, decoding", D),
    ("decode local", D),
    ("prefill local", P),
]


SILENT = [("split, landing", P), ("pulled, prefilled", P)]
"""Here prefill's call is still open, but it has said all that is heard of it."""


@pytest.mark.parametrize(("way", "role"), LIVING)
def test_a_lost_replica_loses_the_placement(way: str, role: Role) -> None:
    session = after(way)
    assert session.replica_lost(role, "its engine died") == [Over("lost")]
    assert session.state is State.LOST
    assert type(session.error) is ReplicaLost
    assert str(session.error) == f"the {role} replica was lost: its engine died"


@pytest.mark.parametrize(
    ("way", "role"), [each for each in LIVING if each not in (("split, landing", P), ("pulled, prefilled", P))]
)
def test_an_engine_that_gives_a_request_up_ends_no_answer(way: str, role: Role) -> None:
    """An engine that is being stopped says "abort" of all it runs: that is no end of an answer."""
    session = after(way)
    assert session.output(role, "cut off", Finish.ABORT) == [Over("lost")]
    assert session.state is State.LOST
    assert type(session.error) is ReplicaLost


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("role", [P, D])
def test_a_part_that_ended_after_its_last_output_changes_nothing(way: str, role: Role) -> None:
    session = after(way)
    before = copied(session)
    if before.state is not State.OPENING and (way, role) not in UNHEARD:
        assert session.reported(role, "finished") == []
    assert replace(session, owner_ended=before.owner_ended) == before


@pytest.mark.parametrize(("way", "role"), UNHEARD)
def test_a_part_that_ended_without_what_was_to_come_from_it_is_lost(way: str, role: Role) -> None:
    session = after(way)
    assert session.reported(role, "finished") == [Over("lost")]
    assert (session.state, type(session.error)) == (State.LOST, ReplicaLost)
    assert str(session.error) == f"the {role} replica's last output did not arrive"


@pytest.mark.parametrize("way", [way for way, (state, _) in WAYS.items() if state not in ENDED])
@pytest.mark.parametrize(
    ("event", "effects"),
    [
        (failed, [Fail(TIMEOUT), Over("failed")]),
        (Session.cancelled, [Over("cancelled")]),
        (Session.interrupted, [Over("failed")]),
    ],
)
def test_a_session_can_end_at_any_time(way: str, event: Event, effects: list[Effect]) -> None:
    session = after(way)
    assert event(session) == effects
    assert session.state is State.OVER
    assert session.held == []


@given(st.sampled_from(Handoff), st.lists(st.sampled_from(sorted(EVENTS)), max_size=25))
def test_any_order_of_events_has_one_end(handoff: Handoff, events: list[str]) -> None:
    session, effects = Session("s", handoff), list[Effect]()
    for number, event in enumerate(events):
        kind, act = EVENTS[event]
        if kind == "output":
            role, finish = event.split()[0], event.split()[2]
            act = output(Role(role), (role, number), None if finish == "None" else Finish(finish))
        legal = session.state in ALLOWED[kind]
        try:
            effects += act(session)
        except IllegalEvent:
            assert not legal
        else:
            assert legal
    effects += session.cancelled()

    (over,) = (place for place, effect in enumerate(effects) if isinstance(effect, Over))
    assert [type(effect) for effect in effects[over + 1 :]] in ([], [Fail]), "after the end of a lost one"
    ends = [
        place
        for place, effect in enumerate(effects)
        if isinstance(effect, Fail) or (isinstance(effect, Deliver) and effect.finish)
    ]
    assert ends in ([], [over - 1], [over + 1]), "the client hears of the end once"
    numbers = [number for _, number in names(effects)]
    assert len(numbers) == len(set(numbers)), "nothing is delivered twice"
    if session.mode is Mode.DISAGGREGATED and handoff is Handoff.PULLED:
        starts = [effect for effect in effects if isinstance(effect, (PrefillOver, StartDecode, EndPrefill))]
        assert [type(effect) for effect in starts] == [PrefillOver, StartDecode, EndPrefill][: len(starts)]
        assert EndPrefill() in effects or not names(effects) or [role for role, _ in names(effects)] == ["prefill"]
        assert numbers == sorted(numbers)
    elif session.mode is Mode.DISAGGREGATED:
        roles = [role for role, _ in names(effects)]
        assert roles == (["prefill"] + ["decode"] * (len(roles) - 1) if roles else [])
        assert numbers[1:] == sorted(numbers[1:])
        assert sum(isinstance(effect, PrefillOver) for effect in effects) <= 1
    else:
        assert numbers == sorted(numbers)
        overs = [number for number, effect in enumerate(effects) if isinstance(effect, PrefillOver)]
        assert overs in ([], [1]), "right after the first output"
        assert not overs or isinstance(effects[0], Deliver)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("role", [P, D])
def test_an_answer_that_goes_on_is_delivered_and_nothing_else_changes(way: str, role: Role) -> None:
    session = after(way)
    goes_on = session.goes_on(role)
    assert goes_on == ((way, role) in GOES_ON)
    if goes_on:
        before = copied(session)
        assert session.output(role, "next", None) == [Deliver("next", finish=False)]
        assert session == before
