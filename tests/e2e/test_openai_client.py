"""The official `openai` client against the real cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.e2e.adapters import NAMES
from tests.e2e.client import MODEL, TIMEOUT_S
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
PARIS: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture
async def client(baton: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{baton.url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0) as made:
        yield made


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, NAMES[0]]


async def test_completion_with_logprobs_and_echo(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0, logprobs=2
    )
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 5
    echoed = await client.completions.create(model=MODEL, prompt="One two", max_tokens=3, temperature=0, echo=True)
    assert echoed.choices[0].text.startswith("One two")


async def test_chat_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=PARIS, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


async def test_streamed_and_whole_answers_agree(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=PARIS, max_tokens=24, temperature=0)
    stream = await client.chat.completions.create(
        model=MODEL, messages=PARIS, max_tokens=24, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content


async def test_n_stop_and_batch(client: openai.AsyncOpenAI) -> None:
    many = await client.chat.completions.create(model=MODEL, messages=PARIS, max_tokens=8, n=3, temperature=0.7)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    stopped = await client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=20, temperature=0, stop=["Paris"]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert "Paris" not in stopped.choices[0].text
    batch = await client.completions.create(model=MODEL, prompt=["A", "B", "C"], max_tokens=3, temperature=0)
    assert len(batch.choices) == 3


async def test_a_json_schema_is_obeyed(client: openai.AsyncOpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=PARIS, max_tokens=40, temperature=0, response_format=schema
    )
    assert raw.headers["x-baton-mode"] == "disaggregated"
    content = raw.parse().choices[0].message.content
    assert isinstance(json.loads(content or "")["city"], str)


async def test_a_named_tool_is_called(client: openai.AsyncOpenAI) -> None:
    function = {"name": "weather", "description": "Weather", "parameters": CITY, "strict": True}
    tool: Any = {"type": "function", "function": function}
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=160,
        temperature=0,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "weather"
    assert "city" in json.loads(calls[0].function.arguments)


async def finished(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        while (found := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.1)
    return found


async def test_a_conversation_is_stored(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input=PARIS, max_output_tokens=24, temperature=0)
    assert "Paris" in first.output_text
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    turns = [*PARIS, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Why?"}]
    asked: Any = {"model": MODEL, "max_output_tokens": 16, "temperature": 0}
    continued = await client.responses.create(input="Why?", previous_response_id=first.id, **asked)
    assert continued.output_text == (await client.responses.create(input=turns, **asked)).output_text
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)


async def test_a_background_response(client: openai.AsyncOpenAI, baton: Cluster) -> None:
    asked: Any = {"model": MODEL, "input": PARIS, "temperature": 0}
    whole = await client.responses.create(max_output_tokens=24, **asked)
    made = await client.responses.create(max_output_tokens=24, background=True, **asked)
    assert made.status == "queued"
    found = await finished(client, made.id)
    assert (found.status, found.output_text) == (whole.status, whole.output_text)
    long = await client.responses.create(
        max_output_tokens=1500, background=True, extra_body={"ignore_eos": True}, **asked
    )
    assert (await client.responses.cancel(long.id)).status == "cancelled"
    assert (await client.responses.retrieve(long.id)).status == "cancelled"
    await asyncio.to_thread(baton.settled)
    assert baton.used_blocks() == 0


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="unknown", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt="word " * 4000)
    assert "maximum context length" in str(caught.value)


async def test_a_timeout_is_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.3).completions.create(
            model=MODEL, prompt="Once", max_tokens=400, extra_body={"ignore_eos": True}
        )
