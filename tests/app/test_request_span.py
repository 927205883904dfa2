"""The span of an HTTP request: where it comes from, where it goes on, and what it says at the end."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from app.api import Gateway
from app.held_response import ASGIApp, Receive
from configs.schema import IngressConfig
from deployments import errors
from deployments.cluster.request_context import RequestContext
from deployments.messages import Mode
from tests.app.toys import OK, Control, Toy, body, start
from tests.traces import PARENT, TRACE, TRACEPARENT, Kept

PATH = "/v1/chat/completions"
NAME = f"POST {PATH}"
SECRET = "a poem about my neighbour"


async def ask(inner: ASGIApp, kept: Kept | None, headers: Any = None, path: str = PATH, method: str = "POST") -> None:
    gateway = Gateway(inner, IngressConfig(), Control(), tracer=None if kept is None else kept.tracer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        await http.request(method, path, content=json.dumps({"prompt": SECRET}), headers=headers)


async def _serve(context: RequestContext, receive: Receive) -> None:
    context.priority = "fast"
    context.note_session([1, 2, 3], [5, 6])
    context.note_session([1, 2], [7])
    context.modes.add(Mode.DISAGGREGATED)
    context.first_token_s = asyncio.get_running_loop().time()


async def test_a_request_that_belongs_to_a_trace() -> None:
    kept, inner = Kept(), Toy(*OK, act=_serve)
    await ask(inner, kept, {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "abc"})
    (span,) = kept.all
    assert span.context is not None
    assert (span.name, span.kind.name, kept.parent(NAME)) == (NAME, "SERVER", PARENT)
    assert (span.context.trace_id, span.context.trace_state.to_header()) == (int(TRACE, 16), "vendor=1")
    told = kept.told(NAME)
    assert 0 <= told.pop("gen_ai.latency.time_to_first_token") <= told.pop("gen_ai.latency.e2e")
    assert told == {
        "http.request.method": "POST",
        "url.path": PATH,
        "http.response.status_code": 200,
        "gen_ai.request.id": "abc",
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 3,
        "baton.class": "fast",
        "baton.mode": "disaggregated",
        "baton.outcome": "ok",
    }
    assert kept.failed() == set()
    assert not {b"traceparent", b"tracestate"} & inner.headers.keys(), "vLLM's server would say that it does not trace"
    assert SECRET not in span.to_json()


async def test_sessions_are_below_it() -> None:
    kept, seen = Kept(), []

    async def look(context: RequestContext, receive: Receive) -> None:
        assert context.span is not None
        seen.append(context.span.traceparent)
        assert context.for_background().span is context.span

    await ask(Toy(*OK, act=look), kept)
    context = kept[NAME].context
    assert context is not None
    assert seen == [f"00-{context.trace_id:032x}-{context.span_id:016x}-03"], "sampled, with a random id"
    assert kept.parent(NAME) == ""


@pytest.mark.parametrize("headers", [[("traceparent", TRACEPARENT)] * 2, [("tracestate", "vendor=1")]])
async def test_two_parents_are_none(headers: list[tuple[str, str]]) -> None:
    kept = Kept()
    await ask(Toy(*OK), kept, headers)
    assert kept.parent(NAME) == ""


async def _fail(context: RequestContext, receive: Receive) -> None:
    context.error = errors.Overloaded(SECRET, 1.0, "queue_full")


async def test_an_error_is_named_by_its_code() -> None:
    kept = Kept()
    await ask(Toy(*OK, act=_fail), kept)
    await ask(Toy(start(400), body(json.dumps({"error": {"message": SECRET}}).encode())), kept)
    told = [dict(span.attributes or {}) for span in kept.all]
    assert [each["error.type"] for each in told] == ["queue_full", "400"]
    assert [each["http.response.status_code"] for each in told] == [429, 400]
    assert kept.failed() == {NAME}
    assert SECRET not in str([span.to_json() for span in kept.all])


async def test_probes_and_our_own_routes_have_no_span() -> None:
    kept = Kept()
    await ask(Toy(*OK), kept, path="/health", method="GET")
    await ask(Toy(*OK), kept, path="/baton/status", method="GET")
    assert kept.all == ()


async def test_the_access_log_names_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.access")
    await ask(Toy(*OK), Kept(), {"traceparent": TRACEPARENT})
    await ask(Toy(*OK), None, {"traceparent": TRACEPARENT})
    traced, plain = (json.loads(record.getMessage()) for record in caplog.records if record.name == "baton.access")
    assert traced["trace_id"] == TRACE
    assert "trace_id" not in plain


async def test_without_a_tracer_nothing_is_made() -> None:
    seen = []

    async def look(context: RequestContext, receive: Receive) -> None:
        seen.append(context.span)

    await ask(Toy(*OK, act=look), None, {"traceparent": TRACEPARENT})
    assert seen == [None]
