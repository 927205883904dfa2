"""What a user of Anthropic's own client sees, blocking and async, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest

from tests.app.clients.baton import KEY, MAX_BODY_BYTES, MAX_CLIENT_PARTS, MODEL, Baton


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


PARIS = said("What is the capital of France?")
ASKED: Any = {"model": MODEL, "messages": PARIS, "max_tokens": 40}
TEXT = "The capital is Paris."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL: Any = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(baton: Baton) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=baton.url, api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(baton: Baton) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=baton.url, auth_token=KEY, max_retries=0) as made:
        yield made


def test_an_answer_and_its_usage(client: anthropic.Anthropic, baton: Baton) -> None:
    baton.says(TEXT)
    answer = client.messages.create(**ASKED)
    (block,) = answer.content
    assert block.type == "text"
    assert (block.text, answer.stop_reason) == (TEXT, "end_turn")
    assert answer.usage.input_tokens == client.messages.count_tokens(model=MODEL, messages=PARIS).input_tokens
    assert client.messages.create(**{**ASKED, "max_tokens": 2}).stop_reason == "max_tokens"


def test_a_stream(client: anthropic.Anthropic, baton: Baton) -> None:
    baton.says(TEXT)
    with client.messages.stream(**ASKED) as stream:
        pieces = list(stream.text_stream)
        whole = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == TEXT
    assert whole.stop_reason == "end_turn"
    assert whole.usage.output_tokens > 1


def test_a_tool_is_called_and_answered(client: anthropic.Anthropic, baton: Baton) -> None:
    baton.says(CALL)
    called = client.messages.create(**ASKED, tools=[TOOL])
    assert called.stop_reason == "tool_use"
    (use,) = [block for block in called.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("weather", {"city": "Paris"})
    with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert (streamed.name, streamed.input) == ("weather", {"city": "Paris"})
    baton.says(TEXT)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns: Any = [*PARIS, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**ASKED, "messages": turns}, tools=[TOOL]).stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("kind", "error_type", "asked"),
    [
        (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"temperature": -1}}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": said("word " * 600)}),
        (anthropic.NotFoundError, "not_found_error", {"model": "other"}),
        (anthropic.RequestTooLargeError, "request_too_large", {"messages": said("x" * MAX_BODY_BYTES)}),
        (anthropic.AuthenticationError, "authentication_error", {"extra_headers": {"Authorization": "Bearer other"}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_of_the_clients_own_class(
    client: anthropic.Anthropic, kind: type[anthropic.APIStatusError], error_type: str, asked: Any, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        client.messages.create(**{**ASKED, "stream": stream, **asked})
    assert caught.value.type == error_type
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["message"]


async def test_an_async_stream_that_is_left_ends_its_session(
    async_client: anthropic.AsyncAnthropic, baton: Baton
) -> None:
    async with baton.left_async():
        asked = {**ASKED, "max_tokens": 400}
        async with async_client.messages.stream(**asked, extra_body={"ignore_eos": True}) as stream:
            async for _ in stream.text_stream:
                break


async def test_too_many_at_once_are_a_rate_limit(async_client: anthropic.AsyncAnthropic, baton: Baton) -> None:
    baton.slowly()
    asked = {**ASKED, "max_tokens": 400, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [await async_client.messages.create(**asked) for _ in range(MAX_CLIENT_PARTS)]
    with pytest.raises(anthropic.RateLimitError) as caught:
        await async_client.messages.create(**ASKED)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        await stream.close()
