"""A response that is held back until its status is certain: held starts, replaced errors, early ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from vllm.exceptions import VLLMValidationError

from app.held_response import ASGIApp, Message, Receive, Scope, Send
from app.timings import Timings
from deployments import errors
from deployments.cluster.request_context import RequestContext, current
from deployments.messages import Mode
from tests.app.toys import OK, STREAM, Toy, body, call_by_hand, post, start


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

    await call_by_hand(inner, seen)
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


async def test_a_replaced_application_that_goes_on_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2], act=_fail)(scope, receive, send)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    assert (await post(inner, Timings(close_s=0.05))).status_code == 429
    assert cancelled.is_set()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_stream_that_breaks_off_says_why(path: str) -> None:
    contexts: list[RequestContext] = []
    anthropic = path == "/v1/messages"
    prefix = b"event: error\ndata: " if anthropic else b"data: "

    async def note(context: RequestContext, receive: Receive) -> None:
        contexts.append(context)

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2], act=note)(scope, receive, send)
        contexts[0].error = errors.ReplicaLost("gone")
        inside = b'{"type": "error", "error"' if anthropic else b'{"error"'
        await send(body(prefix + inside + b': {"message": "Internal server error"}}\n\n'))

    response = await post(inner, path=path)
    before, _, event = response.text.partition("data: 1\n\n")
    assert (response.status_code, before) == (200, "")
    assert event.startswith(prefix.decode())
    told = {"type": "overloaded_error", "message": "gone"}
    ours = {"type": "service_unavailable_error", "message": "gone", "param": None, "code": "replica_lost"}
    assert json.loads(event.removeprefix(prefix.decode())) == (
        {"type": "error", "error": told} if anthropic else {"error": ours}
    )


async def test_an_error_in_the_middle_that_is_not_ours_gets_its_type_and_what_follows_it_stays() -> None:
    event = b'data: {"error": {"message": "no", "type": "BadRequestError", "code": 400}}\n\ndata: [DONE]\n\n'
    response = await post(Toy(*STREAM[:2], body(event)))
    before, error, after = response.text.split("\n\n", 2)
    assert (response.status_code, before, after) == (200, "data: 1", "data: [DONE]\n\n")
    told = {"message": "no", "type": "invalid_request_error", "param": None, "code": 400}
    assert json.loads(error.removeprefix("data: ")) == {"error": told}


async def test_a_stream_that_begins_with_an_error_gets_its_status() -> None:
    event = b'data: {"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}\n\n'
    response = await post(Toy(STREAM[0], body(event, True), body(b"data: [DONE]\n\n")))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("status", "content", "message", "kind"),
    [
        (400, b'{"error": {"message": "no", "type": "Bad Request", "code": 400}}', "no", "invalid_request_error"),
        (
            400,
            b'{"type": "error", "error": {"message": "no", "type": "BadRequestError"}}',
            "no",
            "invalid_request_error",
        ),
        (401, b'{"error": "Unauthorized"}', "Unauthorized", "authentication_error"),
        (404, b'{"detail": "Not Found"}', "Not Found", "not_found_error"),
        (404, b'{"detail": [1]}', "[1]", "not_found_error"),
        (500, b"Internal Server Error", "Internal Server Error", None),
        (503, b"", "Service Unavailable", None),
    ],
)
async def test_every_error_gets_the_shape_and_the_type_of_its_api(
    path: str, status: int, content: bytes, message: str, kind: str | None
) -> None:
    head, tail = body(content[:5], True), body(content[5:])
    response = await post(Toy(start(status, b"text/plain", (b"content-length", b"1")), head, tail), path=path)
    assert response.status_code == status
    if path == "/v1/completions":
        kind = kind or {500: "server_error", 503: "service_unavailable_error"}[status]
        told = {"message": message, "type": kind, "param": None, "code": status}
        assert response.json() == {"error": told}
    else:
        kind = kind or {500: "api_error", 503: "overloaded_error"}[status]
        assert response.json() == {"type": "error", "error": {"type": kind, "message": message}}


async def test_messages_that_begin_with_an_error_have_a_status() -> None:
    event = b'event: error\ndata: {"type": "error", "error": {"type": "internal_error", "message": "no"}}\n\n'
    response = await post(Toy(STREAM[0], body(event, True)), path="/v1/messages")
    assert response.status_code == 500
    assert response.json() == {"type": "error", "error": {"type": "api_error", "message": "no"}}


async def test_an_application_that_raises_is_a_500_in_openais_shape() -> None:
    async def broken(context: RequestContext, receive: Receive) -> None:
        raise ValueError("secret")

    response = await post(Toy(act=broken))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"


@pytest.mark.parametrize(
    ("cause", "status"),
    [(ValueError("no such regex"), 400), (VLLMValidationError("no such regex"), 400), (KeyError("x"), 500)],
)
async def test_a_request_that_is_refused_after_its_stream_has_begun(cause: Exception, status: int) -> None:
    """As /v1/responses: the first events have been sent (and held) when its parameters turn out to be invalid."""

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(STREAM[0], body(b"event: response.created\ndata: {}\n\n", True))(scope, receive, send)
        raise RuntimeError("Caught handled exception, but response already started.") from cause

    response = await post(inner)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"] == ("no such regex" if status == 400 else "internal error")
    assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")


async def test_an_application_that_raises_in_its_stream_does_not_end_it_cleanly() -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*STREAM[:2])(scope, receive, send)
        raise ValueError("secret")

    response = await post(inner)
    assert json.loads(response.text.split("data: ")[-1])["error"]["code"] == "internal_error"
    with pytest.raises(ValueError, match="secret"):
        await call_by_hand(_after(inner, start(), body(b"half", True)), [])


def _after(inner: ASGIApp, *messages: Message) -> ASGIApp:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await Toy(*messages)(scope, receive, send)
        raise ValueError("secret")

    return application


async def test_a_disconnect_reaches_the_application() -> None:
    seen: list[str] = []

    async def listen(context: RequestContext, receive: Receive) -> None:
        seen.append((await receive())["type"])

    await call_by_hand(Toy(act=listen), [], {"type": "http.disconnect"})
    assert seen == ["http.disconnect"]


async def test_cancelling_the_gateway_disconnects_the_application() -> None:
    seen: list[str] = []
    waiting = asyncio.Event()

    async def listen(context: RequestContext, receive: Receive) -> None:
        waiting.set()
        seen.append((await receive())["type"])

    call = asyncio.ensure_future(call_by_hand(Toy(*OK, act=listen), []))
    await waiting.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert seen == ["http.disconnect"]
    assert len(asyncio.all_tasks()) == 1
