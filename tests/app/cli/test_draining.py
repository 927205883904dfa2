"""`baton drain`: what it asks for, what it waits for, and what it prints."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.cli import client, draining, main
from app.cli.client import CliError


def test_what_is_sent() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"some": "thing"})

    for resume in (False, True):
        client.drain("http://baton", "a#1", resume, httpx.MockTransport(answer))
    assert [(each.method, each.url.raw_path.decode()) for each in seen] == [
        ("POST", "/baton/replicas/a%231/drain"),
        ("POST", "/baton/replicas/a%231/resume"),
    ]


def test_a_refusal_says_why() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(409, json={"error": {"message": "a: it is the last"}}))
    with pytest.raises(CliError, match="a: it is the last"):
        client.drain("http://baton", "a", False, transport)


def state_of(phase: str, sessions: int = 0, promised: int = 0) -> dict[str, Any]:
    promise = {"prefill": None, "decode": "d1"}
    pools = {"decode-a": {"replicas": {"d1": {"phase": phase}}}}
    return {"pools": pools, "replicas": {"d1": {"sessions": sessions}}, "promises": [promise] * promised}


def looks_at(*states: dict[str, Any]) -> int:
    """How often it looks until it is content. The last state stays."""
    left, looks = list(states), list[int]()

    def fetch(url: str) -> dict[str, Any]:
        looks.append(1)
        return left.pop(0) if len(left) > 1 else left[0]

    draining.until_empty("http://baton", "d1", fetch, lambda _: None)
    return len(looks)


def test_a_drain_is_waited_for_until_nothing_is_there() -> None:
    busy = [state_of("ready", 2), state_of("draining", 1, 1), state_of("draining", 0, 1), state_of("draining", 1)]
    assert looks_at(*busy, state_of("draining")) == 5
    assert looks_at(state_of("draining", 3), {"pools": {"decode-a": {"replicas": {}}}}) == 2, "it is gone"


def test_a_drain_that_does_not_come_or_is_taken_back_ends_the_wait() -> None:
    for states in ([state_of("ready")], [state_of("draining", 1), state_of("ready", 1)]):
        with pytest.raises(CliError, match="does not drain"):
            looks_at(*states)


def test_it_prints_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"replica": "d1", "sessions": 2}
    monkeypatch.setattr(client, "drain", lambda url, replica, resume: found | {"draining": not resume})
    monkeypatch.setattr(draining, "until_empty", lambda url, replica: None)
    runner = CliRunner()
    assert runner.invoke(main.app, ["drain", "d1"]).stdout == "d1 takes nothing new; 2 sessions are there\n"
    assert runner.invoke(main.app, ["drain", "d1", "--wait"]).stdout == "d1 takes nothing new; no session is there\n"
    assert runner.invoke(main.app, ["drain", "d1", "--resume"]).stdout == "d1 is back in service\n"
