"""One line for each request: what it asked for, what became of it, and why."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from app.held_response import Receive, Scope, Send
from deployments import errors
from deployments.cluster.request_context import RequestContext, current
from deployments.messages import Mode
from tests.app.toys import OK, STREAM, Control, Toy, body, call_by_hand, client, post, start

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The lines so far."""
    caplog.set_level(logging.INFO, "baton.access")
    return lambda: [json.loads(r.getMessage()) for r in caplog.records if r.name == "baton.access"]


async def _serve(context: RequestContext, receive: Receive) -> None:
    """Two answers to one prompt, as with n = 2."""
    context.priority = "fast"
    prompt, answers = [1, 2, 3], ([5, 6], [7])
    for answer in answers:
        context.note_session(prompt, answer)
    context.first_token_s = asyncio.get_running_loop().time()
    context.modes.add(Mode.DISAGGREGATED)
    context.rules.add("lora")


@pytest.mark.parametrize("messages", [OK, STREAM], ids=["plain", "stream"])
async def test_a_request_that_is_served(lines: Lines, messages: Any) -> None:
    await post(Toy(*messages, act=_serve), headers={"x-request-id": "abc"}, path="/v1/completions?key=hidden")
    (line,) = lines()
    assert 0 <= line.pop("ttft_s") <= line.pop("total_s")
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "id": "abc",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "class": "fast",
        "mode": "disaggregated",
        "rule": "lora",
        "prompt_tokens": 3,
        "output_tokens": 3,
    }


async def _fail(context: RequestContext, receive: Receive) -> None:
    context.error = errors.Overloaded("full", 1.0, "queue_full")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_an_error_has_its_code_and_reason(lines: Lines, path: str) -> None:
    await post(Toy(*OK, act=_fail), path=path)
    await post(Toy(start(400), body(b'{"error": {"message": "no", "code": 400}}')), path=path)
    await post(Toy(*OK), path=path, content=b"x" * 101)
    told = [(line["status"], line["outcome"], line["code"], line["reason"]) for line in lines()]
    assert told[:2] == [(429, "error", "queue_full", "full"), (400, "error", 400, None)]
    assert told[2] == (413, "error", "body_too_large", "the request body is over 100 bytes")


SECRET = "a poem about my neighbour"


async def _misread(context: RequestContext, receive: Receive) -> None:
    context.error = errors.RequestFault(f"the grammar cannot be used: {SECRET}")


async def _raise(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError(f"no handler: {SECRET}") from ValueError(SECRET)


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_no_line_quotes_what_a_client_has_written(
    lines: Lines, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """vLLM's errors quote the field that is wrong, and an engine's error its grammar."""
    said = json.dumps({"error": {"message": f"'input': '{SECRET}'", "code": status}}).encode()
    await post(Toy(start(status), body(said)), content=json.dumps({"prompt": SECRET}).encode())
    await post(Toy(*OK, act=_misread), content=json.dumps({"prompt": SECRET}).encode())
    await post(_raise)
    assert [line["code"] for line in lines()] == [status, "request_refused", 400]
    assert SECRET not in caplog.text


async def test_our_own_routes_have_lines(lines: Lines) -> None:
    async with client(Toy(), Control({"pools": {}})) as http:
        await http.get("/health")
        await http.get("/ready")
        await http.post("/ready")
    told = [(line["method"], line["path"], line["status"], line["outcome"], line.get("code")) for line in lines()]
    assert told == [
        ("GET", "/health", 200, "ok", None),
        ("GET", "/ready", 503, "error", "not_ready"),
        ("POST", "/ready", 405, "error", "method_not_allowed"),
    ]


async def test_a_stream_that_breaks_off(lines: Lines) -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2])(scope, receive, send)
        context = current.get()
        assert context is not None
        context.error = errors.ReplicaLost("gone")
        await send(body(b'data: {"error": {"message": "?"}}\n\n', True))
        await send(body(b"data: [DONE]\n\n"))

    await post(inner)
    (line,) = lines()
    assert (line["status"], line["outcome"], line["code"], line["reason"]) == (
        200,
        "broken_off",
        "replica_lost",
        "gone",
    )


async def test_an_application_that_raises_in_its_stream_has_broken_off(lines: Lines) -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2])(scope, receive, send)
        raise ValueError("secret")

    await post(inner)
    (line,) = lines()
    assert (line["status"], line["outcome"], line["reason"]) == (200, "broken_off", "internal error")


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_left(lines: Lines, begun: bool) -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*(STREAM[:2] if begun else ()))(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"

    await call_by_hand(inner, [], {"type": "http.disconnect"})
    (line,) = lines()
    assert (line["status"], line["outcome"]) == (200 if begun else None, "client_left")


async def _fail_at_length(context: RequestContext, receive: Receive) -> None:
    context.error = errors.Overloaded("a\nb" * 1000, 1.0, "queue_full")


async def test_a_line_is_whole_whatever_a_client_sends(lines: Lines) -> None:
    await post(Toy(*OK, act=_fail_at_length), path="/" + "x" * 1000)
    (line,) = lines()
    assert (len(line["path"]), len(line["reason"])) == (500, 500)
    assert line["reason"].startswith("a\nb")


PRINT = """
import logging, sys
from app import access_log
logging.getLogger("baton").setLevel(logging.WARNING)
if sys.argv[1] == "on":
    access_log.start()
    access_log.start()
access_log.Entry({"method": "GET", "path": "/a"}, "id").write(200)
"""


@pytest.mark.parametrize("switch", ["on", "off"])
def test_lines_go_to_the_standard_output_where_the_log_is_on(switch: str) -> None:
    ran = subprocess.run([sys.executable, "-c", PRINT, switch], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stderr == ""
    paths = [json.loads(line)["path"] for line in ran.stdout.splitlines()]
    assert paths == (["/a"] if switch == "on" else [])
