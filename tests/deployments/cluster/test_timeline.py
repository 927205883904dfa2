"""A session's timeline: each step once, one after the other, and only so many timelines are kept."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.cluster import timeline as module
from deployments.cluster.meter import QUEUED, SCHEDULED
from deployments.cluster.timeline import Timeline, Timelines
from deployments.errors import Moved
from deployments.messages import Forecast, Mode, Placement, ReplicaInfo, Role
from tests.deployments.cluster.test_meter import Clock, Event


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def replica(name: str) -> ReplicaInfo:
    return ReplicaInfo(name + "-0", name, Role.DECODE, "node", "print", 16, 10, 4, 512, ())


def placement(mode: Mode, decode: str | None, prefill: str | None = None, reason: str = "split") -> Placement:
    on = [None if each is None else replica(each) for each in (decode, prefill)]
    return Placement("s", 1, mode, reason, on[0], on[1], 4, 1.0, 1.0, 16, Forecast(ttft_s=1.0))


def steps(timeline: Timeline) -> list[tuple[Any, ...]]:
    shown = timeline.shown()
    return [(each["what"], each["where"], each["from_s"], each["to_s"]) for each in shown["spans"]]


def begun(clock: Clock, pulls: bool = False) -> Timeline:
    """Its request was there at 100 s; it began at 100.25 s."""
    clock.now_s += 0.25
    return Timeline("r", "s", 40, clock.now_s - 0.25, [7, 8, 9], pulls)


def test_a_split_session_waits_is_computed_is_handed_over_and_decodes(clock: Clock) -> None:
    timeline = begun(clock)
    clock.now_s += 0.5
    timeline.placed(placement(Mode.DISAGGREGATED, "decode-a", "prefill"))
    clock.now_s += 2.0
    timeline.took(Role.PREFILL, [Event(QUEUED, 7.0), Event(SCHEDULED, 7.5)], 8.75)
    clock.now_s += 0.25
    timeline.took(Role.DECODE, None, 0.0)
    clock.now_s += 1.0
    timeline.took(Role.DECODE, None, 0.0)  # the last one, with its finish
    timeline.ended("length", "")
    assert steps(timeline) == [
        ("frontend", "ingress", 0.0, 0.25),
        ("placement", "session manager", 0.25, 0.75),
        ("queue", "prefill-0", 0.75, 1.25),
        ("prefill", "prefill-0", 1.5, 2.75),
        ("handoff", "decode-a-0", 2.75, 3.0),
        ("decode", "decode-a-0", 3.0, 4.0),
    ]
    shown = timeline.shown()
    assert (shown["ttft_s"], shown["total_s"], shown["outcome"], shown["output_tokens"]) == (2.75, 4.0, "length", 3)
    assert shown["placements"] == [
        {"at_s": 0.75, "mode": "disaggregated", "reason": "split", "prefill": "prefill-0", "decode": "decode-a-0"}
        | {"expected_ttft_s": 1.0}
    ]


def test_decode_may_be_heard_before_the_first_token(clock: Clock) -> None:
    timeline = begun(clock)
    timeline.placed(placement(Mode.DISAGGREGATED, "decode-a", "prefill"))
    clock.now_s += 1.0
    timeline.took(Role.DECODE, None, 0.0)
    clock.now_s += 0.5
    timeline.took(Role.PREFILL, None, 0.0)
    clock.now_s += 1.0
    timeline.ended("length", "")
    assert steps(timeline)[2:] == [
        ("prefill", "prefill-0", 0.25, 1.75),
        ("handoff", "decode-a-0", 1.75, 1.75),
        ("decode", "decode-a-0", 1.75, 2.75),
    ]


def test_where_decode_pulls_the_first_token_is_decodes(clock: Clock) -> None:
    timeline = begun(clock, pulls=True)
    timeline.placed(placement(Mode.DISAGGREGATED, "decode-a", "prefill"))
    clock.now_s += 1.0
    timeline.took(Role.PREFILL, None, 0.0)
    clock.now_s += 0.5
    timeline.took(Role.DECODE, None, 0.0)
    assert timeline.shown()["ttft_s"] == 1.75
    assert steps(timeline)[2:] == [
        ("prefill", "prefill-0", 0.25, 1.25),
        ("handoff", "decode-a-0", 1.25, 1.75),
        ("decode", "decode-a-0", 1.75, None),
    ]


def test_a_move_is_a_step_and_what_follows_has_steps_of_its_own(clock: Clock) -> None:
    timeline = begun(clock)
    timeline.placed(placement(Mode.DECODE_LOCAL, "decode-a"))
    clock.now_s += 1.0
    timeline.took(Role.DECODE, None, 0.0)
    clock.now_s += 1.0
    timeline.again("move", Moved("it goes elsewhere"))
    clock.now_s += 0.5
    timeline.placed(placement(Mode.DISAGGREGATED, "decode-b", "decode-a", "moved"))
    clock.now_s += 0.5
    assert steps(timeline)[2:] == [
        ("prefill", "decode-a-0", 0.25, 1.25),
        ("decode", "decode-a-0", 1.25, 2.25),
        ("placed again", "ingress", 2.25, 2.25),
        ("placement", "session manager", 2.25, 2.75),
        ("prefill", "decode-a-0", 2.75, None),
    ]
    shown = timeline.shown()
    assert [each["note"] for each in shown["spans"] if each["what"] == "placed again"] == ["move: it goes elsewhere"]
    assert (shown["ttft_s"], shown["total_s"], shown["age_s"]) == (1.25, None, 3.25)
    assert timeline.replicas() == {"decode-a-0": "decode-a", "decode-b-0": "decode-b"}


def test_a_refused_session_only_waited(clock: Clock) -> None:
    timeline = begun(clock)
    clock.now_s += 1.0
    timeline.ended("failed", "the queue is full")
    assert steps(timeline)[1:] == [("placement", "session manager", 0.25, 1.25)]
    shown = timeline.shown()
    assert (shown["outcome"], shown["error"], shown["placements"]) == ("failed", "the queue is full", [])


def test_those_that_run_are_kept_and_of_those_that_ended_the_newest() -> None:
    timelines = Timelines(kept=2)
    runs = timelines.begin(Timeline("r", "s0", 1, 0.0, []))
    for number in range(1, 5):
        ended = timelines.begin(Timeline("r", f"s{number}", 1, 0.0, []))
        ended.ended("stop", "")
        timelines.end(ended)
    assert [each.session_id for each in timelines.find("r")] == ["s0", "s3", "s4"]
    assert timelines.find("s2") == []
    assert timelines.find("s0") == [runs]
    assert len(timelines) == 3
    timelines.end(runs)
    for number in (5, 6):
        timelines.end(timelines.begin(Timeline("other", f"s{number}", 1, 0.0, [])))
    assert timelines.find("r") == []
    assert len(timelines) == 2


def test_a_name_that_is_both_a_request_and_its_session_counts_once() -> None:
    timelines = Timelines(kept=1)
    for _ in range(3):
        timelines.end(timelines.begin(Timeline("same", "same", 1, 0.0, [])))
    assert len(timelines.find("same")) == len(timelines) == 1
