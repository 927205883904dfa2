"""The spans of a session: its stages one after the other, under the span of its request, also where it is lost."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from deployments.cluster import spans
from deployments.cluster.meter import QUEUED, SCHEDULED
from deployments.cluster.spans import SessionSpans
from deployments.errors import EngineFault, Moved, NeverFits, ReplicaLost
from deployments.link.replica_side import Runs
from deployments.manager.calls import A, Call, Open
from deployments.manager.manager import SessionManager
from deployments.manager.spans import traced
from deployments.messages import Handoff, Mode, Placement, ReplicaInfo, Role
from deployments.replica.spans import TracedRuns
from load_tests.harness.control_plane import InProcess
from tests.deployments.cluster.asking import prompt
from tests.traces import PARENT, TRACE, TRACEPARENT, Kept


@dataclass
class Event:
    type: int
    timestamp: float


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Session:
    """One session whose clock the test moves. `kept`: its spans."""

    def __init__(self, clock: Clock, handoff: Handoff = Handoff.PUSHED) -> None:
        self.clock, self.kept = clock, Kept()
        self.request = self.kept.tracer.begin("request", {"traceparent": TRACEPARENT}, {}, clock.now_s)
        self.spans = SessionSpans(self.request, handoff, {"baton.session": "s"})

    def after(self, seconds: float) -> SessionSpans:
        self.clock.now_s += seconds
        return self.spans

    def placed(self, placement: Placement) -> None:
        self.after(0.0).asks()
        self.after(0.5).placed(placement, "")

    def ended(self, outcome: str, error: Exception | None = None, tokens: int = 5) -> None:
        self.spans.ended(outcome, error, self.clock.now_s, tokens, tokens)
        self.request.end(self.clock.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spans, "monotonic", clock)
    return clock


def replica(pool: str) -> ReplicaInfo:
    return ReplicaInfo(f"{pool}-0", pool, Role.DECODE, "node", "print", 16, 10, 4, 512, ())


WHOLE = Placement("s", 1, Mode.DECODE_LOCAL, "cheap", replica("decode-a"), None, 4, 1.0, 1.0, cached_tokens=16)
SPLIT = replace(WHOLE, mode=Mode.DISAGGREGATED, prefill=replica("prefill"))
TIMES = [Event(QUEUED, 7.0), Event(SCHEDULED, 7.25)]


def test_a_split_session(clock: Clock) -> None:
    session = Session(clock)
    session.placed(SPLIT)
    session.after(1.0).took(Role.PREFILL, 1, TIMES, 8.0)
    session.after(0.25).took(Role.DECODE, 1, TIMES, 8.0)
    session.after(2.0)
    session.ended("length")
    kept = session.kept
    assert kept.names == ["request", "session", "placement", "queue", "prefill", "handoff", "decode"]
    assert {kept.parent(name) for name in kept.names[2:]} == {"session"}
    assert kept.parent("session") == "request"
    assert {name: kept.seconds(name) for name in kept.names[2:]} == {
        "placement": 0.5,
        "queue": 0.25,
        "prefill": 0.75,
        "handoff": 0.25,
        "decode": 2.0,
    }
    assert kept.failed() == set()
    placed = {"baton.mode": "disaggregated", "baton.reason": "cheap", "baton.cached_tokens": 16, "baton.attempt": 1}
    assert kept.told("placement") == placed
    assert {kept.told(name)["baton.replica"] for name in ("queue", "prefill")} == {"prefill-0"}
    moved = kept.told("handoff")
    assert (moved["baton.from_replica"], moved["baton.replica"]) == ("prefill-0", "decode-a-0")
    assert kept.told("decode")["gen_ai.usage.completion_tokens"] == 5
    told = kept.told("session")
    assert (told["baton.session"], told["baton.outcome"]) == ("s", "length")
    assert (told["gen_ai.latency.time_to_first_token"], told["gen_ai.latency.e2e"]) == (1.5, 3.75)
    assert told["gen_ai.latency.time_in_queue"] == 0.25


def test_a_session_on_one_replica_hands_nothing_over(clock: Clock) -> None:
    session = Session(clock)
    session.placed(WHOLE)
    session.after(1.0).took(Role.DECODE, 1, None, 8.0)
    session.after(2.0)
    session.ended("stop")
    assert session.kept.names == ["request", "session", "placement", "prefill", "decode"]
    assert (session.kept.seconds("prefill"), session.kept.seconds("decode")) == (1.0, 2.0)


def test_where_decode_pulls_the_first_token_is_decodes(clock: Clock) -> None:
    session = Session(clock, Handoff.PULLED)
    session.placed(SPLIT)
    session.after(1.0).took(Role.PREFILL, 1, None, 8.0)
    session.after(0.5).took(Role.DECODE, 1, None, 8.0)
    session.ended("stop")
    assert session.kept.seconds("handoff") == 0.5
    assert session.kept.told("session")["gen_ai.latency.time_to_first_token"] == 2.0


def test_an_output_of_decode_that_overtakes_the_first_token_makes_no_negative_span(clock: Clock) -> None:
    session = Session(clock)
    session.placed(SPLIT)
    session.after(1.0).took(Role.DECODE, 1, None, 8.0)
    session.after(0.5).took(Role.PREFILL, 1, None, 8.0)
    session.after(0.5)
    session.ended("stop")
    assert {name: session.kept.seconds(name) for name in ("prefill", "handoff", "decode")} == {
        "prefill": 1.5,
        "handoff": 0.0,
        "decode": 0.5,
    }


def test_an_engines_times_that_do_not_fit_stay_inside(clock: Clock) -> None:
    session = Session(clock)
    session.placed(WHOLE)
    session.after(0.1).took(Role.DECODE, 1, [Event(QUEUED, 0.0), Event(SCHEDULED, 5.0)], 50.0)
    session.ended("stop")
    assert (session.kept.seconds("queue"), session.kept.seconds("prefill")) == (0.1, 0.0)


@pytest.mark.parametrize(("cause", "failed"), [("loss", {"decode"}), ("move", set())])
def test_a_recovery_spans_the_pause_of_the_answer(clock: Clock, cause: str, failed: set[str]) -> None:
    session = Session(clock)
    session.placed(WHOLE)
    session.after(1.0).took(Role.DECODE, 1, None, 8.0)
    error = Moved("away") if cause == "move" else ReplicaLost("secret text")
    session.after(1.0).again(cause, error, tokens=3)
    assert session.kept.failed() == failed
    session.placed(replace(WHOLE, decode=replica("decode-b")))
    session.after(1.0).took(Role.DECODE, 1, None, 8.0)
    session.after(2.0)
    session.ended("length", tokens=7)
    kept = session.kept
    assert kept.names == [
        *("request", "session", "placement", "prefill", "decode"),
        *("recovery", "placement", "prefill", "decode"),
    ]
    assert {kept.parent(name) for name in ("placement", "prefill")} == {"recovery"}
    assert {kept.parent(name) for name in ("recovery", "decode")} == {"session"}
    assert (kept.seconds("recovery"), kept.seconds("decode")) == (1.5, 2.0)
    assert kept.told("recovery") == {"baton.cause": cause, "baton.attempt": 2}
    assert kept.told("decode")["baton.attempt"] == 2
    assert kept.told("session")["gen_ai.latency.time_to_first_token"] == 1.5, "the client's, which is the first one"
    assert "secret" not in str([span.to_json() for span in kept.all])


@pytest.mark.parametrize(
    ("outputs", "stage"), [([], "prefill"), ([Role.PREFILL], "handoff"), ([Role.PREFILL, Role.DECODE], "decode")]
)
def test_the_stage_in_which_a_session_fails_has_the_error(clock: Clock, outputs: list[Role], stage: str) -> None:
    session = Session(clock)
    session.placed(SPLIT)
    for role in outputs:
        session.after(1.0).took(role, 1, None, 8.0)
    session.after(0.25)
    session.ended("failed", EngineFault("no"))
    assert session.kept.failed() == {stage, "session"}
    assert session.kept.names[-1] == stage
    assert session.kept.seconds(stage) == 0.25
    assert session.kept.told(stage)["error.type"] == "EngineFault"


def test_a_client_that_leaves_is_no_error(clock: Clock) -> None:
    session = Session(clock)
    session.placed(SPLIT)
    session.after(1.0)
    session.ended("cancelled")
    assert session.kept.failed() == set()
    assert session.kept.told("prefill")["baton.outcome"] == "cancelled"


def test_an_answer_that_ends_with_its_first_token_is_not_handed_over(clock: Clock) -> None:
    session = Session(clock)
    session.placed(SPLIT)
    session.after(1.0).took(Role.PREFILL, 1, None, 8.0)
    session.ended("stop")
    assert session.kept.names == ["request", "session", "placement", "prefill"]


def test_a_session_that_finds_no_place(clock: Clock) -> None:
    session = Session(clock)
    session.spans.asks()
    session.after(2.0)
    session.ended("failed", NeverFits("too long"))
    assert session.kept.names == ["request", "session", "placement"]
    assert session.kept.failed() == {"session", "placement"}
    assert session.kept.seconds("placement") == 2.0


def test_a_session_that_asks_nothing(clock: Clock) -> None:
    session = Session(clock)
    session.ended("failed", NeverFits("too long"))
    assert session.kept.names == ["request", "session"]


# ---- in a whole control plane


class Manager:
    """The session manager of a control plane, with its span. `asked`: the `traceparent` of each question."""

    def __init__(self, cluster: InProcess, kept: Kept) -> None:
        self._manager, self._kept = cluster.manager, kept
        self.asked: list[str] = []
        cluster.manager_port.restart(cast(SessionManager, self))

    async def ask(self, call: Call[A]) -> A:
        if not isinstance(call, Open):
            return await self._manager.ask(call)
        self.asked.append(call.request.traceparent)
        return cast(A, await traced(self._kept.tracer, call, self._manager.ask(call)))


def trace_replicas(cluster: InProcess, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    for replica_id, each in cluster.replicas.items():
        plain = cast(Runs, SimpleNamespace(run=each.run, orphan=each.orphan))
        runs = TracedRuns(plain, replica_id.rpartition("-")[0])
        runs.tracer = kept.tracer
        monkeypatch.setattr(each, "run", runs.run)


async def test_the_context_goes_on_to_manager_and_replicas(cluster: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    Manager(cluster, kept)
    trace_replicas(cluster, kept, monkeypatch)
    request = kept.tracer.begin("request", {"traceparent": TRACEPARENT}, {})
    answer = await (await cluster.ask(prompt(40), max_tokens=6, span=request)).over()
    await cluster.settle()
    request.end(time.monotonic())
    assert answer.context.modes == {Mode.DISAGGREGATED}
    stages = ["placement", "admission", "prefill", "handoff", "decode", "part", "part"]
    assert sorted(name for name in kept.names if name != "queue") == sorted(["request", "session", *stages])
    assert kept.parent("request") == PARENT
    assert kept.parent("admission") == "placement"
    assert {kept.parent(name) for name in ("placement", "prefill", "handoff", "decode", "part")} == {"session"}
    assert {span.context.trace_id for span in kept.all if span.context} == {int(TRACE, 16)}
    assert {span.kind.name for span in kept.all if span.name in ("request", "admission", "part")} == {"SERVER"}
    told = kept.told("session")
    assert (told["baton.session"], told["gen_ai.request.id"]) == (answer.request_id, answer.context.request_id)
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (40, 6)
    assert (told["gen_ai.request.max_tokens"], told["baton.outcome"]) == (6, "length")
    assert kept.told("admission")["baton.outcome"] == "placed"
    parts = [dict(span.attributes or {}) for span in kept.all if span.name == "part"]
    assert {part["baton.pool"] for part in parts} == {"prefill", kept.told("decode")["baton.pool"]}
    assert {part["baton.outcome"] for part in parts} == {"finished"}


@pytest.mark.slow
async def test_a_lost_replica_makes_a_recovery(cluster: InProcess) -> None:
    kept = Kept()
    request = kept.tracer.begin("request", {}, {})
    answer = await (await cluster.ask(prompt(20), max_tokens=200, span=request)).has(5)
    owner = (await cluster.placed(answer))["decode"]
    await cluster.kill(owner)
    await answer.over()
    await cluster.settle(dead=[owner])
    assert len(answer.tokens) == 200
    assert kept.told("recovery") == {"baton.cause": "loss", "baton.attempt": 2}
    assert kept.failed() == {"decode"}
    assert kept.told("session")["baton.outcome"] == "length"
    assert kept.told("session")["gen_ai.usage.completion_tokens"] == 200


async def test_what_is_not_traced_carries_nothing_on(cluster: InProcess) -> None:
    left_out, kept = Kept(ParentBased(ALWAYS_OFF)), Kept()
    manager = Manager(cluster, kept)
    await cluster.answer(prompt(20), max_tokens=4)
    await cluster.answer(prompt(20), max_tokens=4, span=left_out.tracer.begin("request", {}, {}))
    await cluster.settle()
    assert manager.asked == ["", ""]
    assert left_out.all == ()
