"""The judge of answers can fail: each kind of fault, from servers that have it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from load_tests.fuzz.bodies import Case
from load_tests.fuzz.judge import verdict
from load_tests.fuzz.run import FAULTS, Asking, Findings

JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"
CASES = 40
ERROR = {"error": {"message": "m", "type": "invalid_request_error", "param": None, "code": "c"}}


def asked(path: str = "/v1/completions", method: str = "POST") -> Case:
    return Case(1, 1, method, path, b"{}", False, None)


def error(kind: str, code: Any) -> bytes:
    return json.dumps({"error": {"message": "m", "type": kind, "param": None, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "kind", "body", "expected"),
    [
        (200, JSON, b"{}", "ok"),
        (200, JSON, b"{", "malformed"),
        (200, JSON, error("server_error", "x"), "malformed"),
        (400, JSON, error("invalid_request_error", "x"), "refused"),
        (400, JSON, b'{"detail": "x"}', "malformed"),
        (404, "text/plain", b"Not Found", "malformed"),
        (500, JSON, error("server_error", "x"), "5xx"),
        (500, "text/plain", b"Internal Server Error", "5xx"),
        (503, JSON, error("service_unavailable_error", "handoff_failed"), "5xx"),
        (503, JSON, error("service_unavailable_error", "no_replica_available"), "no_capacity"),
        (504, JSON, error("timeout_error", "session_timeout"), "5xx"),
        (200, EVENTS, b"data: {}\n\ndata: [DONE]\n\n", "ok"),
        (200, EVENTS, b"data: {}\n\n", "malformed"),
        (200, EVENTS, b"data: {\n\ndata: [DONE]\n\n", "malformed"),
        (200, EVENTS, b"data: " + error("timeout_error", "session_timeout") + b"\n\n", "5xx"),
        (200, EVENTS, b"data: " + error("invalid_request_error", "x") + b"\n\ndata: [DONE]\n\n", "refused"),
        (200, EVENTS, b"data: " + error("service_unavailable_error", "no_replica_available") + b"\n\n", "no_capacity"),
    ],
)
def test_an_answer_is_judged_by_its_status_shape_and_end(status: int, kind: str, body: bytes, expected: str) -> None:
    assert verdict(asked(), status, kind, body) == expected


def test_messages_have_an_error_shape_and_an_end_of_their_own() -> None:
    own = {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}}
    assert verdict(asked("/v1/messages"), 400, JSON, json.dumps(own).encode()) == "refused"
    assert verdict(asked("/v1/completions"), 400, JSON, json.dumps(own).encode()) == "malformed"
    openais = {"error": {"message": "m", "type": "t", "param": None, "code": 400}}
    assert verdict(asked("/v1/messages"), 400, JSON, json.dumps(openais).encode()) == "malformed"
    assert verdict(asked("/v1/completions"), 400, JSON, json.dumps(own).encode()) == "malformed"
    assert verdict(asked("/v1/messages"), 200, EVENTS, b"event: message_stop\ndata: {}\n\n") == "ok"
    assert verdict(asked("/v1/messages"), 200, EVENTS, b"data: [DONE]\n\n") == "malformed"


def test_a_page_and_a_route_of_baton_s_own_are_judged_by_status() -> None:
    assert verdict(asked("/metrics", "GET"), 200, "text/plain", b"# HELP") == "ok"
    assert verdict(asked("/ready?a", "GET"), 503, JSON, b"{}") == "5xx"
    assert verdict(asked(method="HEAD"), 405, JSON, b"") == "refused"


class Server:
    """Answers with a status and a body; `ready`: what it says of its capacity. With `hangs` it never answers.

    `to_messages`: the body of /v1/messages, where that has another shape.
    """

    def __init__(
        self, status: int, body: bytes, ready: int = 200, hangs: bool = False, to_messages: bytes | None = None
    ) -> None:
        self._status, self._body, self._ready, self._hangs = status, body, ready, hangs
        self._to_messages = body if to_messages is None else to_messages
        self.open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.open += 1
        try:
            if self._hangs:
                await asyncio.Event().wait()
            status = self._ready if scope["path"] == "/ready" else self._status
            headers = [(b"content-type", JSON.encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            body = self._to_messages if scope["path"].startswith("/v1/messages") else self._body
            await send({"type": "http.response.body", "body": body})
        finally:
            self.open -= 1


async def findings(server: Any, answered_s: float = 60.0) -> Findings:
    transport = httpx.ASGITransport(server)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton", timeout=None) as http:
        return await Asking(http, 1, answered_s).run(CASES, 4)


def faults(found: Findings) -> int:
    return sum(found.figures()[name] for name in FAULTS)


async def test_a_server_that_answers_500_fails_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    found = await findings(Server(500, error("server_error", "x")))
    assert found.figures()["status_5xx"] == CASES - found.verdicts["left"] > 0
    assert len(found.faults) == found.verdicts["5xx"]
    told = capsys.readouterr().err
    assert "of seed 1: POST /v1/" in told, "a fault says how to make it again"
    assert '"model"' in told


async def test_a_server_that_hangs_fails_every_case_and_no_call_is_left() -> None:
    server = Server(200, b"{}", hangs=True)
    found = await findings(server, answered_s=0.01)
    assert found.figures()["hung"] == CASES - found.verdicts["left"] > 0
    assert server.open == 0


async def test_503_counts_where_every_pool_has_a_ready_replica() -> None:
    body = error("service_unavailable_error", "no_replica_available")
    found = await findings(Server(503, body, ready=200))
    assert found.verdicts["5xx"] > 0
    assert found.verdicts["no_capacity"] == 0
    found = await findings(Server(503, body, ready=503))
    assert found.verdicts["no_capacity"] > 0


async def test_a_server_that_breaks_connections() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ConnectionResetError

    found = await findings(broken)
    assert found.figures()["broken"] == CASES - found.verdicts["left"] > 0


async def test_a_server_that_refuses_has_no_fault() -> None:
    anthropics = {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}}
    found = await findings(Server(400, json.dumps(ERROR).encode(), to_messages=json.dumps(anthropics).encode()))
    assert faults(found) == 0
    assert found.verdicts["refused"] > 0
