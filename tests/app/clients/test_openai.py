"""What a user of OpenAI's own client sees, blocking and async, over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.app.clients.baton import COUNTED, KEY, MAX_BODY_BYTES, MAX_CLIENT_PARTS, MODEL, Baton

PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]
LONG: Any = {
    "model": MODEL,
    "prompt": "a",
    "max_tokens": 480,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}
TEXT = "The capital is Paris."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class City(BaseModel):
    """A city."""

    city: str


@pytest.fixture
def client(baton: Baton) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{baton.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(baton: Baton) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{baton.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_answer_and_its_usage(client: openai.OpenAI, baton: Baton) -> None:
    baton.says(TEXT)
    answer = client.chat.completions.create(model=MODEL, messages=PARIS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=3)
    assert [choice.index for choice in raw.parse().choices] == [0, 1, 2, 3]
    assert raw.headers["x-baton-mode"] == "disaggregated"


def test_a_key_with_limits_is_told_what_it_has_left(baton: Baton) -> None:
    asked: Any = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{baton.gated_url}/v1", api_key=COUNTED, max_retries=0) as limited:
        with limited.completions.with_streaming_response.create(**asked, stream=True) as stream:
            first, _ = stream.headers, stream.read()
        baton.settle()
        second = limited.completions.with_raw_response.create(**asked).headers
        with pytest.raises(openai.RateLimitError) as refused:
            limited.completions.create(**asked)
    third = refused.value.response.headers
    for headers, requests, tokens in ((first, 1, 2000 - 43), (second, 0, 2000 - 86), (third, 0, 2000 - 86)):
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-limit-tokens"]) == ("2", "2000")
        assert headers["x-ratelimit-remaining-requests"] == str(requests)
        assert headers["x-ratelimit-remaining-tokens"] == str(tokens)
        for of in ("requests", "tokens"):
            assert re.fullmatch(r"1m[01]s|[1-5]?\ds", headers[f"x-ratelimit-reset-{of}"]), (
                "a minute, and a second at most"
            )
    with openai.OpenAI(base_url=f"{baton.gated_url}/v1", api_key=KEY, max_retries=0) as free:
        unlimited = free.completions.with_raw_response.create(**asked).headers
    assert not [name for name in unlimited if name.startswith("x-ratelimit")]


def test_a_stream_and_its_usage(client: openai.OpenAI, baton: Baton) -> None:
    baton.says(TEXT)
    with client.chat.completions.stream(model=MODEL, messages=PARIS, stream_options={"include_usage": True}) as stream:
        said = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert len(said) > 1
    assert "".join(said) == whole.choices[0].message.content == TEXT
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 1


def test_a_response_and_its_stream(client: openai.OpenAI, baton: Baton) -> None:
    baton.says(TEXT)
    made = client.responses.create(model=MODEL, input="Which city?")
    assert (made.status, made.output_text) == ("completed", TEXT)
    with client.responses.stream(model=MODEL, input="Which city?") as stream:
        said = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(said) == stream.get_final_response().output_text == TEXT


def test_a_tool_is_called_and_an_answer_is_parsed(client: openai.OpenAI, baton: Baton) -> None:
    baton.says(CALL)
    tools: Any = [openai.pydantic_function_tool(City, name="weather")]
    called = client.chat.completions.parse(model=MODEL, messages=PARIS, tools=tools).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls
    assert called.message.tool_calls[0].function.parsed_arguments == City(city="Paris")
    baton.says('{"city": "Paris"}')
    parsed = client.chat.completions.parse(model=MODEL, messages=PARIS, response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Paris")


@pytest.mark.parametrize(
    ("kind", "status", "asked"),
    [
        (openai.BadRequestError, 400, {"temperature": -1}),
        (openai.BadRequestError, 400, {"messages": [{"role": "user", "content": "word " * 600}]}),
        (openai.NotFoundError, 404, {"model": "other"}),
        (openai.APIStatusError, 413, {"messages": [{"role": "user", "content": "x" * MAX_BODY_BYTES}]}),
        (openai.RateLimitError, 429, {"n": MAX_CLIENT_PARTS + 1}),
        (openai.AuthenticationError, 401, {"extra_headers": {"Authorization": "Bearer other"}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_of_the_clients_own_class(
    client: openai.OpenAI, kind: type[openai.APIStatusError], status: int, asked: Any, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": PARIS, "stream": stream, **asked})
    error = caught.value
    assert (error.status_code, isinstance(error.type, str)) == (status, True)
    assert error.request_id
    if status == 429:
        assert int(error.response.headers["retry-after"]) >= 1


async def test_a_client_that_is_told_to_wait_tries_again(async_client: openai.AsyncOpenAI, baton: Baton) -> None:
    refused = asyncio.Event()

    async def see(response: httpx.Response) -> None:
        if response.status_code == 429:
            refused.set()

    baton.slowly()
    stream = await async_client.completions.create(**LONG, n=MAX_CLIENT_PARTS)
    baton.says(TEXT)
    http: Any = httpx.AsyncClient(event_hooks={"response": [see]})
    async with async_client.with_options(max_retries=5, http_client=http) as patient:
        waits = asyncio.create_task(patient.completions.create(model=MODEL, prompt="b"))
        async with asyncio.timeout(60):
            await refused.wait()
            await stream.close()
            assert (await waits).choices[0].text == TEXT


def test_a_stream_that_is_closed_ends_its_session(client: openai.OpenAI, baton: Baton) -> None:
    with baton.left():
        stream = client.completions.create(**LONG)
        next(iter(stream))
        stream.close()


async def test_many_at_once(async_client: openai.AsyncOpenAI, baton: Baton) -> None:
    baton.says(TEXT)
    many = [async_client.completions.create(model=MODEL, prompt=str(number)) for number in range(MAX_CLIENT_PARTS)]
    assert {answer.choices[0].text for answer in await asyncio.gather(*many)} == {TEXT}


async def test_a_call_that_is_cancelled_ends_its_session(async_client: openai.AsyncOpenAI, baton: Baton) -> None:
    async with baton.left_async():
        call = asyncio.create_task(async_client.completions.create(**{**LONG, "stream": False}))
        await baton.opened()
        call.cancel()
        await asyncio.wait([call])
