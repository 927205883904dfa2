"""Every route asked for every error that it can give: one shape for each API, one list of types.

The server is vLLM's real frontend with a key, and with all routes that options switch on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from fastapi.routing import APIRoute
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.metrics.stats import PrefillStats

from app import openapi
from app.access.gate import Gate
from app.access.keys import parse
from app.access.rate_limit import NAMES
from app.api import Gateway
from app.frontend import build_server
from app.openapi import GENERATES
from app.timings import Timings
from configs.schema import BatonConfig, IngressConfig
from deployments import errors
from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, DEFAULT_SOURCE, resolve
from tests.app.access.test_keys import entry
from tests.app.test_frontend import CHAT, TEXT, FakeCore, NoControl, Server, _scope

MODEL = "org/model"
KEY = {"authorization": "Bearer k"}
CACHED = 3
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b c d e"},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"], CHAT["messages"]]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 6},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
STREAMS = sorted(GENERATES - {"/v1/chat/completions/batch"})
OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC = {**OPENAI, 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
pytestmark = pytest.mark.asyncio(loop_scope="module")


class CachingCore(FakeCore):
    """Finds the first tokens of every prompt in a cache."""

    def _outputs(self, request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        for index, output in enumerate(super()._outputs(request)):
            if index == 0:
                stats = PrefillStats(num_prompt_tokens=len(request.prompt_token_ids or ()), num_cached_tokens=CACHED)
                output.prefill_stats = stats
            yield output


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Server]:
    options = {"api_key": ["k"], "enable_server_load_tracking": True, "enable_tokenizer_info_endpoint": True}
    model = {"name": MODEL}
    args = {"model": model, "prefill": {}, "decode": {"main": {}}, "ingress": {"server_args": options}}
    config, core = BatonConfig.model_validate(args), CachingCore()
    path = Path(resolve(DEFAULT_SOURCE, DEFAULT_CACHE_DIR))
    llm, app = await build_server(config, str(path), core)
    core.script = [*llm.get_tokenizer().encode(TEXT), llm.get_tokenizer().eos_token_id]
    server = Server(llm, app, core, config)
    server.http.headers.update(KEY)
    yield server
    await server.http.aclose()
    llm.shutdown()
    assert llm.output_handler is not None
    await asyncio.wait([llm.output_handler], timeout=60)


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.core.reset()
    yield running
    assert running.llm.get_num_unfinished_requests() == 0


async def ask(server: Server, path: str, **body: Any) -> httpx.Response:
    return await server.http.post(path, json={"model": MODEL, **BODIES[path], **body})


def check(response: httpx.Response, path: str, status: int) -> dict[str, Any]:
    """The error of a response, which has its API's shape and its status's type."""
    assert response.status_code == status, (path, response.text)
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    return check_told(response.json(), path, status)


def check_told(told: dict[str, Any], path: str, status: int) -> dict[str, Any]:
    error = told["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if path.startswith("/v1/messages"):
        assert told == {"type": "error", "error": {"type": ANTHROPIC[status], "message": error["message"]}}
    else:
        assert told.keys() == {"error"}, path
        assert error.keys() == {"message", "type", "param", "code"}, path
        assert error["type"] == OPENAI[status], path
    return dict(error)


async def test_a_missing_key_is_401(server: Server) -> None:
    for path, content in {**BODIES, "/v1/models": {}, f"/v1/models/{MODEL}": {}, "/v1/nothing": {}}.items():
        if path.startswith("/v1"):
            check(await server.http.post(path, json=content, headers={"authorization": ""}), path, 401)


async def test_the_errors_of_our_own_keys(server: Server) -> None:
    """No key, a class that a key may not use, routes for administrators, and a limit that the manager tells of."""
    keys = parse("keys:\n" + entry("a", "k", classes="[default]", requests_per_minute=1), ("default",))
    gateway = Gateway(server.inner, IngressConfig(), NoControl(), gate=Gate(lambda: keys))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        for path, content in {**BODIES, "/v1/models": {}, "/v1/nothing": {}, "/docs": {}, "/nothing": {}}.items():
            told = await http.post(path, json=content)
            check(told, path, 401)
            assert told.headers["www-authenticate"] == "Bearer"
            other = await http.post(path, json=content, headers={**KEY, "x-baton-class": "other"})
            check(other, path, 403)
        for path in ("/metrics", "/baton/status", "/status"):
            check(await http.get(path), path, 401)
            check(await http.get(path, headers=KEY), path, 403)
        server.core.failure = errors.Overloaded("why", 41.2, "requests_per_minute")
        for path in GENERATES:
            told = await http.post(path, json={"model": MODEL, **BODIES[path]}, headers=KEY)
            check(told, path, 429)
            assert told.headers["retry-after"] == "42"
        for path in ("/health", "/ping"):
            assert (await http.get(path)).status_code == 200


async def test_messages_take_the_key_in_anthropics_header(server: Server) -> None:
    for path, content in BODIES.items():
        body, known = {"model": MODEL, **content}, path.startswith("/v1/messages")
        for key, status in (("k", 200 if known else 401), ("other", 401)):
            request = server.http.build_request("POST", path, json=body, headers={"x-api-key": key})
            del request.headers["authorization"]
            if path.startswith("/v1"):
                assert (await server.http.send(request)).status_code == status, path


async def test_an_unknown_route_is_404(server: Server) -> None:
    for path in ("/", "/nothing", "/v1/nothing", "/v1/messages/batches", "/invocations", "/kv_event_sources"):
        check(await server.http.get(path), path, 404)
        check(await server.http.post(path, json={}), path, 404)


async def test_a_wrong_method_is_405(server: Server) -> None:
    documented = (await server.http.get("/openapi.json")).json()["paths"]
    assert documented.keys() >= BODIES.keys() | {"/health", "/ready", "/baton/status", "/load", "/ping"}
    off = ("/v1/responses/", "/v1/files", "/v1/batches")  # here, which comes first
    stored = {path for path in documented if path.startswith(off)}
    for path in [*(documented.keys() - {"/metrics"} - stored), "/docs", "/openapi.json"]:
        response = await server.http.patch(path, json={})
        check(response, path, 405)
    assert (await server.http.patch("/v1/messages", json={})).headers["allow"] == "POST"


@pytest.mark.parametrize("content", [b"{nope", b"", b"[1]", b"{}", b'"\\ud800"', b'"\xed\xa0\x80"'])
async def test_a_body_that_is_no_request_is_400(server: Server, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in BODIES:
        check(await server.http.post(path, content=content, headers=headers), path, 400)
        check(await server.http.post(path, content=content, headers={"content-type": "text/plain"}), path, 400)


@pytest.mark.parametrize("text", [rb"\ud800", rb"\udc00", rb"a \ud800 b", rb"\ude00\ud83d", b"\xed\xa0\xbd"])
async def test_half_of_a_surrogate_pair_is_400_and_says_so(server: Server, text: bytes) -> None:
    for path, body in BODIES.items():
        content = json.dumps({"model": MODEL, **body, "user": "here"}).encode().replace(b"here", text)
        response = await server.http.post(path, content=content, headers={"content-type": "application/json"})
        assert "surrogate" in check(response, path, 400)["message"]
    assert server.core.requests == []


async def test_an_unknown_model_is_404(server: Server) -> None:
    for path in BODIES:
        assert "other" in check(await ask(server, path, model="other"), path, 404)["message"]
    for name in ("other", "org", "org/model/more", "org%2Fother"):
        assert check(await server.http.get(f"/v1/models/{name}"), "/v1/models", 404)["code"] == "model_not_found"


async def test_wrong_parameters_are_400(server: Server) -> None:
    for path in GENERATES:
        check(await ask(server, path, temperature="hot"), path, 400)
        check(await ask(server, path, temperature=-1), path, 400)


async def test_a_body_that_is_too_large_is_413_and_a_slow_one_408(server: Server) -> None:
    config = BatonConfig.model_validate({"prefill": {}, "decode": {"a": {}}, "ingress": {"max_body_bytes": 100}})
    gateway = Gateway(server.inner, config.ingress, NoControl(), timings=Timings(body_s=0.05))

    async def never() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(30)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton", headers=KEY) as http:
        for path in BODIES:
            check(await http.post(path, content=b"x" * 101), path, 413)
            check(await http.post(path, content=never()), path, 408)


async def test_a_header_that_is_too_long_is_400(server: Server) -> None:
    for path, body in BODIES.items():
        response = await server.http.post(path, json=body, headers={"x-baton-class": "x" * 257})
        check(response, path, 400)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (errors.NeverFits("why"), 400),
        (errors.UnknownClass("why"), 400),
        (errors.Overloaded("why", 1.0), 429),
        (errors.Unavailable("why"), 503),
        (errors.ReplicaLost("why"), 503),
        (errors.HandoffFailed("why"), 503),
        (errors.SessionTimeout("why"), 504),
        (errors.SessionError("why"), 500),
    ],
)
async def test_a_failed_session(server: Server, failure: errors.SessionError, status: int, stream: bool) -> None:
    for path in STREAMS if stream else sorted(GENERATES):
        server.core.reset()
        server.core.failure = failure
        assert check(await ask(server, path, stream=stream), path, status)["message"] == "why"


async def test_a_tools_schema_that_is_refused_is_400(server: Server) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        schema = {"type": "object", "properties": {"a": schema}}
    name = {"name": "f", "description": "d"}
    for path, asked in (
        ("/v1/messages", {"tools": [{**name, "input_schema": schema}], "tool_choice": {"type": "any"}}),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {**name, "parameters": schema}}], "tool_choice": "required"},
        ),
    ):
        for stream in (False, True):
            check(await ask(server, path, stream=stream, **asked), path, 400)
    assert server.core.requests == []


async def test_an_error_of_the_chat_under_a_message_stays_that_error(server: Server) -> None:
    error = 'data: {"error": {"message": "why", "type": "BadRequestError", "param": null, "code": 400}}\n\n'

    async def chat() -> AsyncIterator[str]:
        yield error
        yield "data: [DONE]\n\n"

    convert = server.inner.state.anthropic_serving_messages.message_stream_converter
    assert [event async for event in convert(chat())] == [error]


async def test_a_dead_frontend_is_500(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.core, "resources", SimpleNamespace(engine_dead=True))
    for path in GENERATES:
        check(await ask(server, path), path, 500)


@pytest.mark.parametrize("failure", [errors.ReplicaLost("gone"), None], ids=["ours", "of vllm"])
@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_breaks_off(server: Server, path: str, failure: Any) -> None:
    server.core.stall_after = 2
    streamed: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if not streamed:
                server.core.fail(failure)
            streamed.append(message["body"])

    content = json.dumps({"model": MODEL, "stream": True, **BODIES[path]}).encode()
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": content, "more_body": False})
    scope = _scope(path)
    scope["headers"] += [(name.encode(), value.encode()) for name, value in KEY.items()]
    async with asyncio.timeout(60):
        await server.gateway(scope, incoming.get, send)
    lines = b"".join(streamed).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    (told,) = [each for each in events if each.get("error")]
    check_told(told, path, 500 if failure is None else 503)
    assert ("event: error" in lines) == (path == "/v1/messages")


@pytest.mark.parametrize("body", [{"background": True}, {"previous_response_id": "resp_1"}])
async def test_what_needs_stored_responses_says_how_they_are_switched_on(server: Server, body: dict[str, Any]) -> None:
    for stream in (False, True):
        error = check(await ask(server, "/v1/responses", stream=stream, **body), "/v1/responses", 400)
        assert error["code"] == "stored_responses_off"
        assert "ingress.stored_responses" in error["message"]
        assert next(iter(body)) in error["message"]
    assert server.core.requests == []


async def test_the_routes_of_stored_responses_say_so_too(server: Server) -> None:
    http = server.http
    for response in (
        await http.get("/v1/responses/resp_1"),
        await http.delete("/v1/responses/resp_1"),
        await http.post("/v1/responses/resp_1/cancel"),
        await http.get("/v1/responses/resp_1/input_items"),
    ):
        assert check(response, "/v1/responses", 400)["code"] == "stored_responses_off"


async def test_a_model_by_its_id(server: Server) -> None:
    listed = (await server.http.get("/v1/models")).json()
    for name in (MODEL, "org%2Fmodel"):
        (card,) = listed["data"]
        found = (await server.http.get(f"/v1/models/{name}")).json()
        assert (found["id"], found["object"]) == (MODEL, "model")
        assert found.keys() == card.keys()
    assert (await server.http.get("/v1/models/")).json()["object"] == "list"


async def test_routes_that_options_switch_on(server: Server) -> None:
    assert (await server.http.get("/load")).json().keys() == {"server_load"}
    assert "tokenizer_class" in (await server.http.get("/tokenizer_info")).json()
    for response in (await server.http.get("/ping"), await server.http.post("/ping")):
        assert (response.status_code, response.content) == (200, b"")


async def test_load_counts_no_request_that_is_over(server: Server) -> None:
    before = (await server.http.get("/load")).json()
    await ask(server, "/v1/completions")
    await ask(server, "/v1/completions", stream=True)
    await ask(server, "/v1/completions", temperature=-1)
    assert (await server.http.get("/load")).json() == before


def _cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(details["cached_tokens"] if details else usage["cache_read_input_tokens"])


@pytest.mark.parametrize("path", STREAMS)
async def test_usage_counts_cached_tokens(server: Server, path: str) -> None:
    assert _cached((await ask(server, path)).json()["usage"]) == CACHED


@pytest.mark.parametrize("path", STREAMS)
async def test_usage_of_a_stream_counts_cached_tokens(server: Server, path: str) -> None:
    options = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    text = (await ask(server, path, stream=True, **options)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    found = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    assert _cached([usage for usage in found if usage][-1]) == CACHED


async def test_the_document_has_every_route_with_its_headers_and_errors(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    assert document["info"]["title"] == "Baton"
    assert document["info"]["version"][0].isdigit()
    shown = {r.path_format for r in server.inner.routes if isinstance(r, APIRoute) and r.include_in_schema}
    one = "/v1/responses/{response_id}"
    stored = {one, f"{one}/cancel", f"{one}/input_items"}
    file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
    batches = {"/v1/files", file, f"{file}/content", "/v1/batches", batch, f"{batch}/cancel"}
    assert document["paths"].keys() == shown | stored | batches | {"/health", "/ready", "/baton/status"}
    for path, item in document["paths"].items():
        for operation in item.values():
            _check_operation(path, operation)
    assert "503" in document["paths"][one]["delete"]["responses"]
    assert "409" in document["paths"][file]["delete"]["responses"]
    assert "multipart/form-data" in document["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    messages = document["paths"]["/v1/messages"]["post"]["responses"]
    assert messages.keys() == {"200", "400", "401", "403", "404", "408", "413", "429", "500", "503", "504"}
    assert "Retry-After" in messages["429"]["headers"]
    assert "HTTPValidationError" not in json.dumps(document["paths"])


def _check_operation(path: str, operation: dict[str, Any]) -> None:
    named = {parameter.get("$ref", "").rpartition("/")[2] for parameter in operation["parameters"]}
    assert "X-Request-Id" in named
    for status, response in operation["responses"].items():
        assert "X-Request-Id" in response["headers"], path
        if status >= "400":
            kind = "AnthropicError" if path.startswith("/v1/messages") else "Error"
            assert response["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{kind}"}
    if path in GENERATES:
        assert named >= {"X-Session-Id", "X-Baton-Class"}
        assert operation["responses"]["200"]["headers"].keys() >= {"X-Baton-Mode", "X-Baton-Rule", *NAMES}
        assert operation["responses"]["429"]["headers"].keys() >= {"Retry-After", *NAMES}


async def test_the_document_has_routes_that_are_added_before_it_is_made() -> None:
    app = FastAPI()
    openapi.complete(app)
    app.add_api_route("/v1/load_lora_adapter", lambda: None, methods=["POST"])
    document = app.openapi()
    _check_operation("/v1/load_lora_adapter", document["paths"]["/v1/load_lora_adapter"]["post"])
    assert app.openapi() is document, "it is made once"


async def test_the_documents_pages_work(server: Server) -> None:
    for path in ("/docs", "/redoc"):
        response = await server.http.get(path)
        assert response.status_code == 200
        assert "Baton" in response.text
        assert "/openapi.json" in response.text
