"""The timeline of a request: over a whole control plane, and what is said where something does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from app.api import Gateway
from app.live.feed import Feed
from app.live.page import Page
from app.live.sessions import Sessions, clock_ahead_s
from configs.schema import IngressConfig
from deployments.cluster.timeline import Timeline, Timelines
from deployments.engine.protocol import WorkerSpans
from deployments.errors import ReplicaLost
from deployments.messages import Mode, Placement, ReplicaInfo, Role
from load_tests.harness.control_plane import PREFILL, InProcess, config, in_process
from tests.app.toys import OK, Control, Toy

PROMPT = [100 + number for number in range(100)]


async def no_others(name: str, timeout_s: float) -> list[Any]:
    return []


def over(cluster: InProcess) -> Sessions:
    async def ask(pool: str, replica: str, sessions: list[str]) -> list[WorkerSpans]:
        assert replica.rpartition("-")[0] == pool
        if replica not in cluster.replicas:
            raise ReplicaLost("gone")
        return await cluster.replicas[replica].spans(sessions)

    return Sessions(cluster.timelines, ask, no_others)


async def shown_of(sessions: Sessions, name: str) -> dict[str, Any]:
    found = await sessions.find(name)
    assert found is not None
    (session,) = found["sessions"]
    return {**session, "silent": found["silent"]}


async def test_a_split_answer_has_every_step_from_arrival_to_its_end(no_leaks: None) -> None:
    async with in_process(config()) as cluster:
        answer = await (await cluster.ask(PROMPT, max_tokens=20)).over()
        await cluster.settle()
        shown = await shown_of(over(cluster), answer.request_id)
    steps = {each["what"]: each for each in shown["spans"]}
    order = ["frontend", "placement", "prefill", "handoff", "decode"]
    assert [each["what"] for each in shown["spans"] if each["what"] in order] == order
    assert {"offer", "chunk", "writes", "landed", "received"} <= steps.keys()
    assert (steps["chunk"]["where"], steps["landed"]["where"]) == (PREFILL, PREFILL)
    assert steps["offer"]["where"] == steps["received"]["where"] == steps["decode"]["where"] != PREFILL
    assert steps["chunk"]["note"] == "up to token 100"
    assert steps["placement"]["to_s"] <= steps["offer"]["from_s"] <= steps["received"]["from_s"] <= shown["total_s"]
    assert steps["chunk"]["from_s"] <= steps["writes"]["from_s"] <= steps["landed"]["from_s"]
    assert all(0 <= each["from_s"] <= each["to_s"] <= shown["total_s"] + 1.0 for each in shown["spans"])
    assert (shown["outcome"], shown["output_tokens"], shown["silent"]) == ("length", 20, [])
    assert 0 < shown["ttft_s"] < shown["total_s"]


async def test_a_session_that_runs_is_shown_and_so_are_its_moves(no_leaks: None) -> None:
    async with in_process(config()) as cluster:
        sessions = over(cluster)
        answer = await (await cluster.ask(PROMPT, max_tokens=400)).has(5)
        before = await shown_of(sessions, answer.request_id)
        source = before["placements"][0]["decode"]
        assert cluster.replicas[source].move_out([answer.request_id]) == 1
        await answer.over()
        await cluster.settle()
        await cluster.bury(source)
        after = await shown_of(sessions, answer.request_id)
    assert (before["outcome"], before["total_s"], before["spans"][-1]["to_s"]) == (None, None, None)
    assert [each["reason"] for each in after["placements"]] == ["split", "moved"]
    (again,) = [each for each in after["spans"] if each["what"] == "placed again"]
    assert again["note"].startswith("move: ")
    assert (after["outcome"], after["output_tokens"], after["silent"]) == ("length", 400, [source])


def placed(name: str) -> Timeline:
    """A session that was placed on a replica of that name."""
    replica = ReplicaInfo(name, "decode-a", Role.DECODE, "node", "print", 16, 10, 4, 512)
    timeline = Timeline("r", "s", 3, 0.0, [])
    timeline.placed(Placement("s", 1, Mode.DECODE_LOCAL, "short prompt", replica, None, 4, 1.0, 1.0))
    return timeline


async def test_a_request_of_another_ingress_is_asked_for_there() -> None:
    theirs, asked = Timelines(4), list[str]()
    theirs.begin(placed("d-0"))

    async def silent(*_: object) -> list[WorkerSpans]:
        raise ReplicaLost("gone")

    async def others(name: str, timeout_s: float) -> list[Any]:
        asked.append(name)
        return [RuntimeError("it stops"), None, await Sessions(theirs, silent, no_others).here(name)]

    mine = Sessions(Timelines(4), silent, others)
    shown = await shown_of(mine, "r")
    assert (shown["session_id"], shown["silent"], asked) == ("s", ["d-0"], ["r"])
    assert await mine.find("another") is None


async def test_only_so_many_questions_go_to_the_other_ingresses_at_once() -> None:
    now, most = 0, 0
    goes_on = asyncio.Event()

    async def others(name: str, timeout_s: float) -> list[Any]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await goes_on.wait()
        now -= 1
        return []

    sessions = Sessions(Timelines(4), lambda *_: no_others("", 0), others)
    looks = [asyncio.create_task(sessions.find(str(number))) for number in range(50)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert most == 8
    goes_on.set()
    assert await asyncio.gather(*looks) == [None] * 50


@pytest.mark.parametrize(("theirs_s", "ahead_s"), [(10.5, 0.0), (10.0, 0.0), (1000.5, 990.0), (3.5, -7.0)], ids=str)
def test_another_clock_is_told_from_the_same_one(theirs_s: float, ahead_s: float) -> None:
    assert clock_ahead_s(theirs_s, 10.0, 11.0) == ahead_s


async def test_the_route_answers_in_json_also_for_ids_with_slashes() -> None:
    timelines = Timelines(4)
    timelines.begin(Timeline("a/b c", "s", 3, 0.0, []))
    sessions = Sessions(timelines, lambda *_: no_others("", 0), no_others)
    gateway = Gateway(Toy(*OK), IngressConfig(), Control(), page=Page(Feed(Control(), None, "m"), sessions))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        found = await http.get("/status/sessions/a%2Fb%20c")
        unknown = await http.get("/status/sessions/nothing")
    assert (found.status_code, found.json()["request_id"]) == (200, "a/b c")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
