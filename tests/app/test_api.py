"""The gateway around toy applications: routes, limits, request ids, held-back starts, replaced errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app import api
from app import held_response as exchange
from app.api import Gateway
from app.errors import TABLE, answer
from app.held_response import ASGIApp, Message, Receive, Scope, Send
from configs.schema import IngressConfig
from deployments import errors
from deployments.cluster.request_context import RequestContext, current
from deployments.manager.calls import Call, Ready, Status
from deployments.messages import Mode

POOLS = {"prefill": {"ready": True, "replicas": []}, "decode-a": {"ready": True, "replicas": []}}


class Control:
    def __init__(self, answer: Any = None, delay_s: float = 0.0) -> None:
        self.answer = {"ready": True, "pools": POOLS} if answer is None else answer
        self.delay_s = delay_s

    async def ask(self, call: Call[Any]) -> Any:
        assert isinstance(call, Ready | Status)
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, Exception):
            raise self.answer
        return dict(self.answer)


class Toy:
    """Reads the request, then sends `messages`; `act` runs in between, with the request's context."""

    def __init__(self, *messages: Message, act: Any = None) -> None:
        self.messages = messages
        self.act = act
        self.calls = 0
        self.body = b""
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        self.headers = dict(scope["headers"])
        assert len(self.headers) == len(scope["headers"]), "a header came twice"
        self.body = (await receive())["body"]
        context = current.get()
        assert context is not None
        if self.act:
            await self.act(context, receive)
        for message in self.messages:
            await send(message)


def start(status: int = 200, kind: bytes = b"application/json", *more: tuple[bytes, bytes]) -> Message:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), *more],
    }


def body(content: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


OK = (start(), body(b"{}"))
STREAM = (
    start(kind=b"text/event-stream; charset=utf-8"),
    body(b"data: 1\n\n", True),
    body(b"data: [DONE]\n\n"),
)


def client(inner: ASGIApp, control: Control | None = None, limit: int = 100) -> httpx.AsyncClient:
    gateway = Gateway(inner, IngressConfig(max_body_bytes=limit), control or Control())
    return httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton")


async def post(inner: ASGIApp, **kwargs: Any) -> httpx.Response:
    async with client(inner) as http:
        return await http.post("/v1/completions", **{"content": b"{}", **kwargs})


async def get(path: str, control: Control) -> httpx.Response:
    async with client(Toy(), control) as http:
        return await http.get(path)


async def test_health_is_alive_whatever_the_control_plane_does() -> None:
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
    assert (response.status_code, response.json()) == (503, {"ready": False, "pools": pools})


@pytest.mark.parametrize("path", ["/ready", "/baton/status"])
@pytest.mark.parametrize("control", [Control(RuntimeError("down")), Control(delay_s=5.0)])
async def test_a_silent_control_plane_is_a_503(path: str, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "CONTROL_TIMEOUT_S", 0.05)
    response = await get(path, control)
    assert response.status_code == 503
    assert ("down" if isinstance(control.answer, Exception) else "Timeout") in response.json()["error"]


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


async def test_a_body_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "BODY_TIMEOUT_S", 0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(5)

    assert (await post(Toy(*OK), content=never())).status_code == 408


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


async def test_the_context_says_who_asks_and_a_long_header_is_refused() -> None:
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


async def test_the_start_waits_for_content() -> None:
    seen: list[Message] = []
    contexts: list[RequestContext] = []

    async def note(context: RequestContext, receive: Receive) -> None:
        contexts.append(context)

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(STREAM[0], body(b"", True), act=note)(scope, receive, send)
        assert seen == []
        contexts[0].modes.add(Mode.PREFILL_LOCAL)
        await send(STREAM[1])
        assert [message["type"] for message in seen] == ["http.response.start", "http.response.body"]
        await send(STREAM[2])

    await _call(inner, seen)
    assert (b"x-baton-mode", b"prefill_local") in seen[0]["headers"]
    assert b"".join(message["body"] for message in seen[1:]) == b"data: 1\n\ndata: [DONE]\n\n"


async def test_what_responses_streams_before_its_engine_speaks_is_held_too() -> None:
    prelude = body(b"event: response.created\ndata: {}\n\n", True)
    assert (await post(Toy(STREAM[0], prelude, *STREAM[1:]))).text.startswith("event: response.created")

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(STREAM[0], prelude)(scope, receive, send)
        context = current.get()
        assert context is not None
        context.error = errors.Overloaded("full", 1.0)
        await send(STREAM[1])

    assert (await post(inner)).status_code == 429


async def _fail(context: RequestContext, receive: Receive) -> None:
    context.error = errors.Overloaded("full", 0.2)


CORS = (b"access-control-allow-origin", b"*")


@pytest.mark.parametrize(
    "messages",
    [OK, STREAM, (start(500, b"application/json", CORS), body(b'{"error": {"message": "?"}}'))],
    ids=["plain", "stream", "error"],
)
async def test_a_failed_session_replaces_the_response(messages: tuple[Message, ...]) -> None:
    response = await post(Toy(*messages, act=_fail))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.headers["content-type"] == "application/json"
    assert response.headers.get("access-control-allow-origin") == ("*" if messages[0]["status"] == 500 else None)
    assert response.json()["error"] == {
        "message": "full",
        "type": "rate_limit_error",
        "param": None,
        "code": "overloaded",
    }


FINGERPRINT = b'{"choices":[],"system_fingerprint":"vllm-1"}'
MARKED = b'{"choices":[],"system_fingerprint":"moved-vllm-1"}'


@pytest.mark.parametrize("moved", [False, True])
async def test_a_seeds_answer_that_went_on_elsewhere_says_so_in_its_last_chunk(moved: bool) -> None:
    async def move(context: RequestContext, receive: Receive) -> None:
        context.seed_moved = moved

    length = (b"content-length", str(len(FINGERPRINT)).encode())
    whole = await post(Toy(start(200, b"application/json", length), body(FINGERPRINT), act=move))
    assert whole.content == (MARKED if moved else FINGERPRINT)
    assert whole.headers["content-length"] == str(len(whole.content))
    first, last = b"data: {}\n\n", b"data: " + FINGERPRINT + b"\n\n"
    stream = Toy(start(200, b"text/event-stream"), body(first, True), body(last), act=move)
    assert (await post(stream)).content == first + b"data: " + (MARKED if moved else FINGERPRINT) + b"\n\n"


async def test_a_replaced_application_sees_a_disconnect() -> None:
    over = asyncio.Event()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2], act=_fail)(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"
        await send(STREAM[2])
        over.set()

    assert (await post(inner)).status_code == 429
    assert over.is_set()


async def test_a_replaced_application_that_goes_on_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CLOSE_TIMEOUT_S", 0.05)
    cancelled = asyncio.Event()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2], act=_fail)(scope, receive, send)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    assert (await post(inner)).status_code == 429
    assert cancelled.is_set()


@pytest.mark.parametrize("prefix", [b"data: ", b"event: error\ndata: "], ids=["openai", "anthropic"])
async def test_a_stream_that_breaks_off_says_why(prefix: bytes) -> None:
    contexts: list[RequestContext] = []

    async def note(context: RequestContext, receive: Receive) -> None:
        contexts.append(context)

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2], act=note)(scope, receive, send)
        contexts[0].error = errors.ReplicaLost("gone")
        inside = b'{"type": "error", "error"' if prefix.startswith(b"event") else b'{"error"'
        await send(body(prefix + inside + b': {"message": "Internal server error"}}\n\n'))

    response = await post(inner)
    before, _, event = response.text.partition("data: 1\n\n")
    assert (response.status_code, before) == (200, "")
    assert event.startswith(prefix.decode())
    error = json.loads(event.removeprefix(prefix.decode()))["error"]
    assert (error["message"], error["code"]) == ("gone", "replica_lost")


async def test_an_error_in_the_middle_that_is_not_ours_stays_as_it_is() -> None:
    event = b'data: {"error": {"code": 500}}\n\n'
    response = await post(Toy(*STREAM[:2], body(event)))
    assert (response.status_code, response.text) == (200, "data: 1\n\n" + event.decode())


async def test_a_stream_that_begins_with_an_error_gets_its_status() -> None:
    event = b'data: {"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}\n\n'
    response = await post(Toy(STREAM[0], body(event, True), body(b"data: [DONE]\n\n")))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (401, b'{"error": "Unauthorized"}', "Unauthorized"),
        (404, b'{"detail": "Not Found"}', "Not Found"),
        (500, b"Internal Server Error", "Internal Server Error"),
    ],
)
async def test_an_error_in_another_shape_is_put_into_openais(status: int, content: bytes, message: str) -> None:
    head, tail = body(content[:5], True), body(content[5:])
    response = await post(Toy(start(status, b"text/plain", (b"content-length", b"1")), head, tail))
    assert response.status_code == status
    assert response.json()["error"]["message"] == message


async def test_an_application_that_raises_is_a_500_in_openais_shape() -> None:
    async def broken(context: RequestContext, receive: Receive) -> None:
        raise ValueError("secret")

    response = await post(Toy(act=broken))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"


async def test_an_application_that_raises_in_its_stream_does_not_end_it_cleanly() -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2])(scope, receive, send)
        raise ValueError("secret")

    response = await post(inner)
    assert json.loads(response.text.split("data: ")[-1])["error"]["code"] == "internal_error"
    with pytest.raises(ValueError, match="secret"):
        await _call(_after(inner, start(), body(b"half", True)), [])


def _after(inner: ASGIApp, *messages: Message) -> ASGIApp:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*messages)(scope, receive, send)
        raise ValueError("secret")

    return application


async def test_a_disconnect_reaches_the_application() -> None:
    seen: list[str] = []

    async def listen(context: RequestContext, receive: Receive) -> None:
        seen.append((await receive())["type"])

    await _call(Toy(act=listen), [], {"type": "http.disconnect"})
    assert seen == ["http.disconnect"]


async def test_cancelling_the_gateway_disconnects_the_application() -> None:
    seen: list[str] = []
    waiting = asyncio.Event()

    async def listen(context: RequestContext, receive: Receive) -> None:
        waiting.set()
        seen.append((await receive())["type"])

    call = asyncio.ensure_future(_call(Toy(*OK, act=listen), []))
    await waiting.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert seen == ["http.disconnect"]
    assert len(asyncio.all_tasks()) == 1


async def _call(inner: ASGIApp, seen: list[Message], *then: Message) -> None:
    """One POST by hand: messages to the client into `seen`, messages from it after the body from `then`."""
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    for message in ({"type": "http.request", "body": b"{}", "more_body": False}, *then):
        incoming.put_nowait(message)

    async def send(message: Message) -> None:
        seen.append(message)

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "asgi": {"version": "3.0"}}
    async with asyncio.timeout(60):
        await Gateway(inner, IngressConfig(), Control())(scope, incoming.get, send)


def test_every_session_error_is_in_the_table() -> None:
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert classes <= TABLE.keys()


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (errors.NeverFits("x"), 400, "context_length_exceeded", None),
        (errors.UnknownClass("x"), 400, "unknown_class", None),
        (errors.Overloaded("x", 2.1), 429, "overloaded", "3"),
        (errors.Overloaded("x", 0.2, "predicted_ttft"), 429, "predicted_ttft", "1"),
        (errors.Unavailable("x"), 503, "no_replica_available", "5"),
        (errors.ReplicaLost("x"), 503, "replica_lost", "1"),
        (errors.HandoffFailed("x"), 503, "handoff_failed", "1"),
        (errors.SessionTimeout("x"), 504, "session_timeout", None),
        (errors.SessionError(), 500, "session_failed", None),
        (KeyError("secret"), 500, "internal_error", None),
    ],
)
def test_the_table(error: Exception, status: int, code: str, retry_after: str | None) -> None:
    response = answer(error)
    assert (response.status, response.body["error"]["code"]) == (status, code)
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in str(response.body)
