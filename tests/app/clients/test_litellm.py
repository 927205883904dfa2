"""What a user of LiteLLM sees, blocking and async, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.app.clients.baton import KEY, MAX_BODY_BYTES, MAX_CLIENT_PARTS, MODEL, Baton

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "The capital is Paris."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    import litellm

    monkeypatch.setattr(litellm, "telemetry", False)
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    monkeypatch.setattr(litellm, "num_retries", None)
    return litellm


@pytest.fixture
def options(baton: Baton) -> dict[str, Any]:
    """What every call says: where Baton is, its model and a question."""
    served = {"api_base": f"{baton.url}/v1", "api_key": KEY, "max_retries": 0}
    return {"model": f"hosted_vllm/{MODEL}", "messages": PARIS, **served}


@pytest.fixture
def complete(litellm: Any, options: dict[str, Any]) -> Callable[..., Any]:
    return partial(_call, litellm.completion, options)


@pytest.fixture
def complete_async(litellm: Any, options: dict[str, Any]) -> Callable[..., Any]:
    return partial(_call, litellm.acompletion, options)


def _call(function: Callable[..., Any], options: dict[str, Any], **more: Any) -> Any:
    return function(**{**options, **more})


def test_an_answer_and_its_usage(complete: Callable[..., Any], baton: Baton) -> None:
    baton.says(TEXT)
    answer = complete(n=2)
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


def test_a_stream_and_its_usage(complete: Callable[..., Any], baton: Baton) -> None:
    baton.says(TEXT)
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == TEXT
    assert chunks[-1].usage.completion_tokens > 1


def test_a_tool_is_called_and_an_answer_has_a_schema(complete: Callable[..., Any], baton: Baton) -> None:
    baton.says(CALL)
    (call,) = complete(tools=[TOOL]).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    baton.says('{"city": "Paris"}')
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    assert complete(response_format=schema).choices[0].message.content == '{"city": "Paris"}'


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_api(complete: Callable[..., Any], baton: Baton, stream: bool) -> None:
    baton.says(TEXT)
    answer = complete(model=f"anthropic/{MODEL}", api_base=baton.url, max_tokens=40, stream=stream)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == TEXT
    else:
        assert answer.choices[0].message.content == TEXT


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("BadRequestError", {"temperature": -1}),
        ("ContextWindowExceededError", {"messages": [{"role": "user", "content": "word " * 600}]}),
        ("NotFoundError", {"model": "hosted_vllm/other"}),
        ("BadRequestError", {"messages": [{"role": "user", "content": "x" * MAX_BODY_BYTES}]}),
        ("RateLimitError", {"n": MAX_CLIENT_PARTS + 1}),
        ("AuthenticationError", {"api_key": "other"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_of_the_clients_own_class(
    litellm: Any, complete: Callable[..., Any], kind: str, asked: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(getattr(litellm, kind)) as caught:
        complete(stream=stream, **asked)
    assert str(caught.value)


async def test_many_at_once(complete_async: Callable[..., Any], baton: Baton) -> None:
    baton.says(TEXT)
    answers = await asyncio.gather(*(complete_async() for _ in range(MAX_CLIENT_PARTS)))
    assert {answer.choices[0].message.content for answer in answers} == {TEXT}


async def test_a_stream_that_is_closed_ends_its_session(complete_async: Callable[..., Any], baton: Baton) -> None:
    async with baton.left_async():
        asked = {"model": f"openai/{MODEL}", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        stream = await complete_async(stream=True, **asked)
        await anext(aiter(stream))
        await stream.aclose()
