"""How fast a client is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app import pace
from app.held_response import Message
from app.pace import BURST_S, BYTES_PER_REFUSAL, LONGEST_S, Pace, PacedSend
from tests.app.toys import OK, Toy, body, client, start


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_refusals_come_at_once_and_then_so_many_in_a_second() -> None:
    paced = Pace(20.0, clock := Clock())
    assert [paced.delay_s("a", 0) for _ in range(int(20 * BURST_S))] == [0.0] * 100
    assert [round(paced.delay_s("a", 0), 3) for _ in range(3)] == [0.05, 0.1, 0.15]
    assert paced.delay_s("b", 0) == 0.0, "another client is not delayed"
    clock.now_s += 0.15
    assert round(paced.delay_s("a", 0), 3) == 0.05, "time pays it off"
    clock.now_s += 2 * BURST_S
    assert [paced.delay_s("a", 0) for _ in range(100)] == [0.0] * 100


def test_a_large_body_counts_more() -> None:
    paced = Pace(20.0, Clock())
    assert paced.delay_s("a", 99 * BYTES_PER_REFUSAL) == 0.0
    assert round(paced.delay_s("a", 0), 3) == 0.05


def test_no_refusal_waits_longer_than_the_bound() -> None:
    paced = Pace(1.0, Clock())
    assert max(paced.delay_s("a", 0) for _ in range(100)) == LONGEST_S


def test_none_waits_where_the_pace_is_off() -> None:
    paced = Pace(0.0, Clock())
    assert {paced.delay_s("a", 10**9) for _ in range(1000)} == {0.0}


def test_the_clients_that_it_remembers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_MOST_CLIENTS", 10)
    paced = Pace(1.0, Clock())
    for number in range(100):
        paced.delay_s(f"client-{number}", 0)
    assert len(paced._used_until_s) == 10


async def test_the_refusals_of_a_client_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MOST_DELAYED", 3)
    paced = Pace(0.001, Clock())
    paced.delay_s("a", BYTES_PER_REFUSAL)
    waiting = [asyncio.ensure_future(paced.delay("a", 0)) for _ in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await paced.delay("a", 0)  # at once
    assert not any(each.done() for each in waiting)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    assert paced._delayed == {}, "nothing is kept of a client that left"


async def test_refusals_are_delayed_and_answers_and_overload_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(round(delay_s, 3))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    paced = Pace(1.0, Clock())
    paced.delay_s("a", 5 * BYTES_PER_REFUSAL)
    for status in (200, 429, 503, 400, 404):
        await PacedSend(paced, "a", send)(start(status))
    assert slept == [2.0, 3.0]
    assert [message["status"] for message in sent] == [200, 429, 503, 400, 404]


async def test_a_client_that_is_refused_all_the_time_is_slowed_down_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: dict[str, list[float]] = {"a": [], "b": []}
    key = "a"

    async def delay(self: PacedSend) -> None:
        waits[key].append(self._pace.delay_s(self._client, self.body_bytes))

    monkeypatch.setattr(PacedSend, "delay", delay)
    async with client(Toy(start(404), body(b"{}")), refusals_per_s=1.0, limit=10**6) as http:

        async def ask(content: bytes = b"{}") -> Any:
            return await http.post("/v1/completions", content=content, headers={"authorization": f"Bearer {key}"})

        for _ in range(8):
            await ask()
        refused = await ask(b'{"n": 100000}')
        key = "b"
        await ask()
    assert refused.status_code == 400
    assert waits["a"][:5] == [0.0] * 5
    assert 2.0 < waits["a"][7] < 3.0
    assert len(waits["a"]) == 9, "what the gateway refuses itself counts, too"
    assert waits["b"] == [0.0]


async def test_a_served_request_is_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def delay(self: PacedSend) -> None:
        raise AssertionError("it must not be delayed")

    monkeypatch.setattr(PacedSend, "delay", delay)
    async with client(Toy(*OK)) as http:
        assert (await http.post("/v1/completions", content=b"{}")).status_code == 200
