"""vLLM's real frontend and our gateway over a scripted core, asked through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from fastapi import FastAPI
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from app import model_route
from app.api import Gateway
from app.frontend import ALLOWED_ROUTES, ClusterLLM, build_server, frontend_config
from configs.schema import BatonConfig
from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, DEFAULT_SOURCE, resolve
from deployments.cluster.request_context import RequestContext, current
from deployments.errors import (
    HandoffFailed,
    NeverFits,
    Overloaded,
    ReplicaLost,
    SessionError,
    SessionTimeout,
    Unavailable,
)
from deployments.manager.calls import Call, Ready
from deployments.messages import Mode

MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_TOKENS = 300
TEXT = " Paris is the capital of France."
pytestmark = pytest.mark.asyncio(loop_scope="module")


class FakeCore(EngineCoreClient):
    """Answers every request with the tokens of `script`; `failure` and `fail_after`: how it fails instead."""

    resources = SimpleNamespace(engine_dead=False)

    def __init__(self) -> None:
        self.queue: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.script: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.contexts: list[RequestContext | None] = []
        self.aborted: list[str] = []
        self.failure: SessionError | None = None
        self.fail_after: int | None = None
        self.stall_after: int | None = None
        self.added = asyncio.Semaphore(0)
        self.ended = asyncio.Semaphore(0)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.queue.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for _ in request_ids:
            self.ended.release()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.requests.append(request)
        self.contexts.append(context := current.get())
        self.added.release()
        if context is not None:
            context.modes.add(Mode.DECODE_LOCAL)
            context.error = self.failure
        for output in self._outputs(request):
            self.queue.put_nowait(EngineCoreOutputs(outputs=[output]))

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    def fail(self, failure: SessionError) -> None:
        """Fail what has stalled."""
        for request, context in zip(self.requests, self.contexts, strict=True):
            assert context is not None
            context.error = failure
            failed = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            self.queue.put_nowait(EngineCoreOutputs(outputs=[failed]))

    def _outputs(self, request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        params = request.sampling_params
        assert params is not None
        assert params.max_tokens is not None
        fail_after = 0 if self.failure else self.fail_after
        end = min(params.max_tokens, len(self.script))
        for index, token in enumerate(self.script[:end]):
            if index == fail_after:
                yield EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
                return
            if index == self.stall_after:
                return
            last = index == end - 1
            reason = FinishReason.LENGTH if params.max_tokens <= len(self.script) else FinishReason.STOP
            yield EngineCoreOutput(
                request.request_id,
                [token],
                new_logprobs=_logprobs([token], params.logprobs),
                new_prompt_logprobs_tensors=_prompt_logprobs(request) if index == 0 else None,
                finish_reason=reason if last else None,
            )


def _logprobs(tokens: list[int], count: int | None) -> LogprobsLists | None:
    if count is None:
        return None
    ids = np.array([[token, *range(count)] for token in tokens]).reshape(len(tokens), count + 1)
    values = np.full(ids.shape, -0.5, dtype=np.float32)
    return LogprobsLists(ids, values, np.ones(len(tokens), dtype=np.int64))


def _prompt_logprobs(request: EngineCoreRequest) -> LogprobsTensors | None:
    params, prompt = request.sampling_params, request.prompt_token_ids
    lists = _logprobs(list(prompt or ())[1:], params.prompt_logprobs if params else None)
    if lists is None:
        return None
    return LogprobsTensors(*(torch.from_numpy(np.asarray(part)) for part in lists[:3]))


class NoControl:
    """A control plane with one ready pool."""

    async def ask(self, call: Call[Any]) -> Any:
        return {"ready": True, "pools": {"prefill": {"ready": True, "replicas": []}}} if isinstance(call, Ready) else {}


class Server:
    """The frontend, its gateway, the core below and a client above."""

    def __init__(self, llm: ClusterLLM, app: FastAPI, core: FakeCore, config: BatonConfig) -> None:
        self.llm, self.inner, self.core = llm, app, core
        self.gateway = Gateway(app, config.ingress, NoControl())
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.gateway, raise_app_exceptions=False), base_url="http://baton"
        )
        http: Any = self.http  # openai names its own fork of httpx, and takes the original
        self.openai = openai.AsyncOpenAI(http_client=http, base_url="http://baton/v1", api_key="-", max_retries=0)

    async def text(self, **kwargs: Any) -> Any:
        return await self.openai.completions.create(model=MODEL, **{"prompt": "Hello", **kwargs})

    async def chat(self, **kwargs: Any) -> Any:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.openai.chat.completions.create(model=MODEL, **{"messages": messages, **kwargs})


def _config(default_max_tokens: int | None = None, **server_args: Any) -> BatonConfig:
    ingress = {"server_args": server_args, "default_max_tokens": default_max_tokens}
    return BatonConfig.model_validate({"prefill": {}, "decode": {"main": {}}, "ingress": ingress})


@pytest.fixture(scope="module")
def model_path() -> Path:
    return Path(resolve(DEFAULT_SOURCE, DEFAULT_CACHE_DIR))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model_path: Path) -> AsyncIterator[Server]:
    core = FakeCore()
    config = _config(DEFAULT_MAX_TOKENS, tool_call_parser="hermes", enable_auto_tool_choice=True)
    llm, app = await build_server(config, str(model_path), core)
    core.script = [*llm.get_tokenizer().encode(TEXT), llm.get_tokenizer().eos_token_id]
    server = Server(llm, app, core, config)
    yield server
    await server.http.aclose()
    llm.shutdown()
    assert llm.output_handler is not None
    await asyncio.wait([llm.output_handler], timeout=60)
    assert llm.output_handler.done()


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.core.reset()
    yield running
    assert running.llm.get_num_unfinished_requests() == 0


async def test_warnings_of_ours_are_not_lost(server: Server) -> None:
    """The packages beneath vLLM's server may change the root logger."""
    assert logging.getLogger("baton.core").isEnabledFor(logging.WARNING)


async def test_completion(server: Server) -> None:
    raw = await server.openai.completions.with_raw_response.create(
        model=MODEL, prompt="Hello", max_tokens=5, extra_headers={"x-request-id": "abc"}
    )
    answer = raw.parse()
    assert answer.choices[0].text == " Paris is the capital of"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 5)
    (request,), (context,) = server.core.requests, server.core.contexts
    assert raw.headers["x-request-id"] == "abc"
    assert raw.headers["x-baton-mode"] == "decode_local"
    assert answer.id == "cmpl-abc"
    assert request.external_req_id == "cmpl-abc-0"
    assert request.request_id.startswith("cmpl-abc-0-")
    assert context is not None
    assert context.request_id == "abc"


async def test_chat(server: Server) -> None:
    answer = await server.chat()
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    prompt = server.llm.get_tokenizer().decode(server.core.requests[0].prompt_token_ids)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert server.core.requests[0].sampling_params.max_tokens == DEFAULT_MAX_TOKENS


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "max_completion_tokens"),
        ("/v1/responses", {"input": "Hi"}, "max_output_tokens"),
    ],
)
async def test_an_answer_without_a_limit_gets_the_default_one(
    server: Server, path: str, body: dict[str, Any], limit: str
) -> None:
    for given in ({}, {limit: 7}, {limit: DEFAULT_MAX_TOKENS + 1}):
        assert (await server.http.post(path, json={"model": MODEL, **body, **given})).status_code == 200
    asked = [request.sampling_params.max_tokens for request in server.core.requests if request.sampling_params]
    assert asked == [DEFAULT_MAX_TOKENS, 7, DEFAULT_MAX_TOKENS + 1]


@pytest.mark.parametrize("chat", [False, True])
async def test_streaming_with_usage(server: Server, chat: bool) -> None:
    ask = server.chat if chat else server.text
    stream = await ask(max_tokens=4, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join((part.delta.content or "") if chat else part.text for part in parts)
    assert text == " Paris is the capital"
    assert parts[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "sessions"),
    [
        ("completions", {"prompt": "Hello"}, 1),
        ("completions", {"prompt": "Hello", "n": 2}, 2),
        ("completions", {"prompt": ["a b", "c d"]}, 2),
        ("completions", {"prompt": [[1, 2], [3, 4]], "n": 2}, 4),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "n": 2}, 2),
        ("responses", {"input": "Hi"}, 1),
        ("messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}, 1),
    ],
)
async def test_every_session_of_a_request_sees_its_context(
    server: Server, path: str, body: dict[str, Any], sessions: int, stream: bool
) -> None:
    response = await server.http.post(f"/v1/{path}", json={"model": MODEL, "stream": stream, **body})
    assert response.status_code == 200
    assert response.headers["x-baton-mode"] == "decode_local"
    assert len(server.core.requests) == sessions
    assert len({request.request_id for request in server.core.requests}) == sessions
    assert {context.request_id for context in server.core.contexts if context} == {response.headers["x-request-id"]}
    assert all(context is server.core.contexts[0] for context in server.core.contexts)


async def test_several_choices_and_prompts(server: Server) -> None:
    answer = await server.text(prompt=["a b", "c d"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {" Paris is"}


async def test_prompt_of_token_ids(server: Server) -> None:
    await server.text(prompt=[5, 6, 7], max_tokens=1)
    assert server.core.requests[0].prompt_token_ids == [5, 6, 7]


async def test_stop_string_ends_the_answer_and_aborts_the_session(server: Server) -> None:
    answer = await server.text(stop=["capital"])
    assert answer.choices[0].text == " Paris is the "
    assert answer.choices[0].finish_reason == "stop"
    assert server.core.aborted == [server.core.requests[0].request_id]


async def test_logprobs_and_echo(server: Server) -> None:
    answer = await server.text(prompt="a b c", max_tokens=2, logprobs=2, echo=True)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "a b c Paris is"
    assert logprobs.tokens == ["a", " b", " c", " Paris", " is"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5]
    answer = await server.chat(max_tokens=1, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs.content[0].token == " Paris"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_schema_reaches_the_core(server: Server) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    await server.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert server.core.requests[0].sampling_params.structured_outputs.json == schema


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
]


async def test_tools_with_a_parser(server: Server) -> None:
    """SmolLM2's template does not show tools to the model; a call that the model writes is still parsed."""
    core, tokenizer = server.core, server.llm.get_tokenizer()
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    before, core.script = core.script, [*tokenizer.encode(call), tokenizer.eos_token_id]
    try:
        choice = (await server.chat(tools=TOOLS)).choices[0]
    finally:
        core.script = before
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "f"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1}
    assert "tool" not in tokenizer.decode(core.requests[0].prompt_token_ids)
    assert core.requests[0].sampling_params.structured_outputs.structural_tag, "what a call looks like is held to"


async def test_a_required_tool_is_a_grammar(server: Server) -> None:
    """A call's arguments are an object of its schema, though the tool does not say that it is strict."""
    await server.chat(tools=TOOLS, tool_choice="required")
    tag = json.loads(server.core.requests[0].sampling_params.structured_outputs.structural_tag)
    schemas = [each["content"]["json_schema"] for each in tag["format"]["tags"]]
    assert schemas
    assert all(schema == TOOLS[0]["function"]["parameters"] for schema in schemas)


async def test_kv_transfer_params_of_a_client_go_no_further(server: Server) -> None:
    extra = {
        "kv_transfer_params": {"do_remote_prefill": True},
        "vllm_xargs": {"kv_transfer_params": "x", "a": 1},
    }
    await server.text(max_tokens=1, extra_body=extra)
    assert server.core.requests[0].sampling_params.extra_args == {"a": 1}


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("completions", {"model": "other", "prompt": "a"}, 404),
        ("completions", {"prompt": [5] * 2048}, 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi " * 3000}]}, 400),
        ("completions", {"prompt": "a", "max_tokens": 5000}, 400),
        ("completions", {"prompt": "a", "temperature": -1}, 400),
        ("completions", {"prompt": "a", "temperature": "hot"}, 400),
        ("completions", {"prompt": "a", "n": 0}, 400),
        ("chat/completions", {**CHAT, "n": 0}, 400),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400),
        ("chat/completions", {**CHAT, "max_tokens": 0}, 400),
        ("completions", {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, 400),
        ("completions", {"prompt": "a", "logprobs": 99}, 400),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 99}, 400),
        ("completions", {"prompt": "a", "top_p": 2}, 400),
        ("completions", {"prompt": {"a": 1}}, 400),
        ("completions", {"prompt": []}, 400),
        ("completions", {}, 400),
        ("completions", {"prompt": [10**7]}, 400),
        ("completions", {"prompt": "a", "logit_bias": {"99999999": 1}}, 400),
        ("chat/completions", {"messages": []}, 400),
        ("chat/completions", {**CHAT, "response_format": BAD_SCHEMA}, 400),
    ],
)
async def test_an_impossible_request_never_reaches_the_core(
    server: Server, path: str, body: dict[str, Any], status: int, stream: bool
) -> None:
    response = await server.http.post(f"/v1/{path}", json={"model": MODEL, "stream": stream, **body})
    _check_error(response, status)
    assert server.core.requests == []


@pytest.mark.parametrize("value", [0, -1, "a", [], [1], True])
async def test_structured_outputs_that_is_no_object(server: Server, value: Any) -> None:
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", CHAT)):
        response = await server.http.post(f"/v1/{path}", json={"model": MODEL, **body, "structured_outputs": value})
        assert _check_error(response, 400)["code"] == "not_an_object"
    assert server.core.requests == []


async def test_arguments_of_a_tool_call_that_are_nested_deeply(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "[" * 3000}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]
    response = await server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert _check_error(response, 400)["code"] == "nested_too_deeply"
    assert server.core.requests == []


@pytest.mark.parametrize("content", [b"{nope", b"[1]", b""])
async def test_a_body_that_is_no_request(server: Server, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    _check_error(await server.http.post("/v1/completions", content=content, headers=headers), 400)


def _check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error["message"], str)
    return dict(error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a"}),
        ("completions", {"prompt": ["a", "b"], "n": 2}),
        ("chat/completions", CHAT),
        ("chat/completions", {**CHAT, "n": 2}),
        ("responses", {"input": "a"}),
        ("messages", {**CHAT, "max_tokens": 4}),
    ],
)
@pytest.mark.parametrize(
    ("failure", "status", "code", "retry_after"),
    [
        (Overloaded("full", 2.5), 429, "overloaded", "3"),
        (NeverFits("too long"), 400, "context_length_exceeded", None),
    ],
)
async def test_a_session_that_failed_before_its_first_token_gives_a_real_status(
    server: Server,
    path: str,
    body: dict[str, Any],
    stream: bool,
    failure: SessionError,
    status: int,
    code: str,
    retry_after: str | None,
) -> None:
    server.core.failure = failure
    response = await server.http.post(f"/v1/{path}", json={"model": MODEL, "stream": stream, **body})
    if path != "messages":  # whose errors have no code
        assert _check_error(response, status)["code"] == code
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Unavailable("none"), openai.InternalServerError),
        (ReplicaLost("gone"), openai.InternalServerError),
        (HandoffFailed("late"), openai.InternalServerError),
        (SessionTimeout("late"), openai.InternalServerError),
        (Overloaded("full", 1), openai.RateLimitError),
        (NeverFits("long"), openai.BadRequestError),
    ],
)
async def test_the_openai_client_raises_its_own_errors(
    server: Server, failure: SessionError, expected: type[openai.APIStatusError]
) -> None:
    server.core.failure = failure
    with pytest.raises(expected, match=str(failure)):
        await server.chat(stream=True)


async def test_an_error_in_the_middle_is_no_clean_end(server: Server) -> None:
    server.core.fail_after = 2
    with pytest.raises(openai.InternalServerError):
        await server.chat()
    stream = await server.chat(stream=True)
    with pytest.raises(openai.APIError):
        _ = [chunk async for chunk in stream]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a"}),
        ("chat/completions", CHAT),
        ("responses", {"input": "a"}),
        ("messages", {**CHAT, "max_tokens": 4}),
    ],
)
async def test_a_stream_that_breaks_off_says_why(server: Server, path: str, body: dict[str, Any]) -> None:
    server.core.stall_after = 2
    streamed: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if not streamed:
                server.core.fail(ReplicaLost("gone"))
            streamed.append(message["body"])

    content = json.dumps({"model": MODEL, "stream": True, **body}).encode()
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": content, "more_body": False})
    async with asyncio.timeout(60):
        await server.gateway(_scope(f"/v1/{path}"), incoming.get, send)
    lines = b"".join(streamed).decode().splitlines()
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    (error,) = [each["error"] for each in told if each.get("error")]
    anthropic = path == "messages"
    assert (error["message"], error.get("code")) == ("gone", None if anthropic else "replica_lost")
    assert error["type"] == ("overloaded_error" if anthropic else "service_unavailable_error")


def _scope(path: str) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "query_string": b"", "asgi": {}, "headers": headers}


@pytest.mark.parametrize(("stream", "n"), [(False, 1), (False, 2), (True, 1), (True, 2)])
@pytest.mark.parametrize("how", ["disconnect", "cancel"])
async def test_a_client_that_leaves_aborts_its_sessions(server: Server, stream: bool, n: int, how: str) -> None:
    server.core.stall_after = 2
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": stream, "n": n}).encode()
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: Any) -> None: ...

    call = asyncio.ensure_future(server.gateway(_scope("/v1/completions"), incoming.get, send))
    async with asyncio.timeout(60):
        for _ in range(n):
            await server.core.added.acquire()
        if how == "disconnect":
            incoming.put_nowait({"type": "http.disconnect"})
        else:
            call.cancel()
        await asyncio.wait([call])
        for _ in range(n):
            await server.core.ended.acquire()
    assert set(server.core.aborted) == {request.request_id for request in server.core.requests}


async def test_routes(server: Server) -> None:
    for path in ("/v1/models", "/version", "/metrics", "/health", "/ready", "/baton/status", "/openapi.json"):
        assert (await server.http.get(path)).status_code == 200, path
    paths = {getattr(route, "path", None) for route in server.inner.router.routes}
    assert paths == ALLOWED_ROUTES | {model_route.PATH}
    for path in ("/load", "/tokenizer_info", "/scale_elastic_ep", "/inference/v1/generate", "/v1/nothing"):
        _check_error(await server.http.post(path, json={}), 404)
    _check_error(await server.http.get("/v1/completions"), 405)


async def test_storing_is_a_wish_where_it_is_off(server: Server) -> None:
    made = await server.openai.responses.create(model=MODEL, input="Hi", store=True, background=False)
    assert made.output_text == TEXT


async def test_tokenize(server: Server) -> None:
    tokens = (await server.http.post("/tokenize", json={"model": MODEL, "prompt": "a b"})).json()
    assert (tokens["count"], tokens["max_model_len"]) == (2, 2048)
    body = {"model": MODEL, "tokens": tokens["tokens"]}
    assert (await server.http.post("/detokenize", json=body)).json() == {"prompt": "a b"}


async def test_a_dead_core_is_an_error_in_openais_shape(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.core, "resources", SimpleNamespace(engine_dead=True))
    response = await server.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert "EngineCore" in _check_error(response, 500)["message"]
    assert server.core.requests == []


async def test_the_server_is_still_whole(server: Server) -> None:
    """Stands last: nothing above has killed the frontend's output loop."""
    assert not server.llm.errored


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tool_cal_parser": "hermes"}, "no option 'tool_cal_parser'"),
        ({"max_model_len": 9}, "may not set .'max_model_len'."),
        ({"otlp_traces_endpoint": "http://collector:4317"}, "may not set .'otlp_traces_endpoint'."),
        ({"enable_auto_tool_choice": True}, "requires --tool-call-parser"),
        ({"chat_template_content_format": "nonsense"}, "chat-template-content-format"),
        ({"uvicorn_log_level": 5}, "uvicorn-log-level"),
    ],
)
async def test_a_wrong_server_option_is_named(model_path: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        frontend_config(_config(**options), str(model_path))


async def test_server_options_are_taken(model_path: Path) -> None:
    config = frontend_config(_config(stream_interval=3, max_logprobs=5, middleware=[]), str(model_path))
    assert config.scheduler_config.stream_interval == 3
    assert config.model_config.max_logprobs == 5
    assert config.model_config.max_model_len == 2048
    assert config.model_config.served_model_name == MODEL
    assert str(config.model_config.dtype) == "torch.bfloat16"


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_vllm_writes_logs_as_baton_does(model_path: Path, log_format: str) -> None:
    config = _config().model_copy(update={"log_format": log_format})
    assert frontend_config(config, str(model_path)).logging_config.formatter == log_format
