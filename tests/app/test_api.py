"""The gateway around toy applications: routes, limits, request ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.held_response import Receive
from app.timings import Timings
from deployments.cluster.request_context import RequestContext
from deployments.messages import Mode
from tests.app.toys import OK, POOLS, Control, Toy, body, client, post, start

QUICK = Timings(control_s=0.05, body_s=0.05)


async def get(path: str, control: Control, **options: Any) -> httpx.Response:
    async with client(Toy(), control, **options) as http:
        return await http.get(path)


async def test_health_is_alive_when_the_control_plane_fails() -> None:
    response = await get("/health", Control(RuntimeError("down")))
    assert (response.status_code, response.json()) == (200, {"status": "alive"})
    assert response.headers["x-request-id"]


async def test_ready() -> None:
    response = await get("/ready", Control())
    assert (response.status_code, response.json()) == (200, {"ready": True, "pools": POOLS})


@pytest.mark.parametrize(
    "pools",
    [
        {},
        {**POOLS, "decode-b": {"ready": False, "replicas": [{"replica_id": "r", "phase": "loading model"}]}},
    ],
)
async def test_not_ready_says_why(pools: dict[str, Any]) -> None:
    response = await get("/ready", Control({"ready": True, "pools": pools}))
    told = response.json()
    error = told.pop("error")
    assert (response.status_code, told) == (503, {"ready": False, "pools": pools})
    assert (error["type"], error["code"]) == ("service_unavailable_error", "not_ready")


@pytest.mark.parametrize("path", ["/ready", "/baton/status"])
@pytest.mark.parametrize("control", [Control(RuntimeError("down")), Control(delay_s=5.0)])
async def test_a_silent_control_plane_is_a_503(path: str, control: Control) -> None:
    response = await get(path, control, timings=QUICK)
    assert response.status_code == 503
    error = response.json()["error"]
    assert ("down" if isinstance(control.answer, Exception) else "Timeout") in error["message"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "manager_away")


async def test_status_counts_by_mode_rule_and_error() -> None:
    async def place(context: RequestContext, receive: Receive) -> None:
        context.modes |= {Mode.DISAGGREGATED, Mode.DECODE_LOCAL}
        context.rules.add("structured output")

    async with client(Toy(*OK, act=place)) as http:
        response = await http.post("/v1/completions", content=b"{}")
        await http.post("/v1/completions", content=b"x" * 101)
        status = (await http.get("/baton/status")).json()
    assert response.headers["x-baton-mode"] == "decode_local,disaggregated"
    assert response.headers["x-baton-rule"] == "structured output"
    assert status["pools"] == POOLS
    assert status["ingress"] == {
        "modes": {"disaggregated": 1, "decode_local": 1},
        "rules": {"structured output": 1},
        "errors": {"413": 1},
    }


async def test_our_routes_answer_get_only() -> None:
    async with client(Toy()) as http:
        response = await http.post("/ready")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"


async def _chunks(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_body_over_the_limit_never_reaches_the_application(streamed: bool) -> None:
    toy = Toy(*OK)
    response = await post(toy, content=_chunks(b"x" * 60, b"x" * 41) if streamed else b"x" * 101)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert toy.calls == 0


async def test_a_body_at_the_limit_arrives_whole() -> None:
    toy = Toy(*OK)
    assert (await post(toy, content=_chunks(b"x" * 60, b"y" * 40))).status_code == 200
    assert toy.body == b"x" * 60 + b"y" * 40


async def test_a_body_that_does_not_arrive() -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(5)

    assert (await post(Toy(*OK), QUICK, content=never())).status_code == 408


async def test_a_request_id_is_kept() -> None:
    toy = Toy(start(200, b"text/plain", (b"x-request-id", b"vllm's own")), body(b"ok"))
    response = await post(toy, headers={"X-Request-Id": "abc-1"})
    assert response.headers.get_list("x-request-id") == ["abc-1"]
    assert toy.headers[b"x-request-id"] == b"abc-1"


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "\N{SNOWMAN}".encode(), "a\tb"])
async def test_a_bad_request_id_is_replaced(given: str | bytes) -> None:
    toy = Toy(*OK)
    response = await post(toy, headers={b"X-Request-Id": given.encode() if isinstance(given, str) else given})
    fresh = response.headers["x-request-id"]
    assert len(fresh) == 32
    assert toy.headers[b"x-request-id"] == fresh.encode()


async def test_the_context_names_the_client_and_a_long_header_is_refused() -> None:
    seen: list[RequestContext] = []

    async def note(context: RequestContext, receive: Receive) -> None:
        seen.append(context)

    toy = Toy(start(), body(b"{}"), act=note)
    headers = {"x-session-id": "s", "x-baton-class": "batch", "authorization": "Bearer k"}
    await post(toy, headers=headers, content=b'{"user": "anna"}')
    (context,) = seen
    assert (context.affinity, context.priority, context.chat) == ("s", "batch", False)
    assert context.client.startswith("key ")
    refused = await post(toy, headers={"x-session-id": "s" * 257})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "header_too_long")
    assert toy.calls == 1
