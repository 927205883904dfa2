"""What a user of LangChain's `ChatOpenAI` sees, blocking and async, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, SecretStr

from tests.app.clients.baton import KEY, MAX_BODY_BYTES, MAX_CLIENT_PARTS, MODEL, Baton

QUESTION = "What is the capital of France?"
TEXT = "The capital is Paris."
CALL = '<tool_call>\n{"name": "City", "arguments": {"city": "Paris"}}\n</tool_call>'


class City(BaseModel):
    """A city."""

    city: str


@pytest.fixture
async def model(baton: Baton) -> AsyncIterator[Any]:
    """It has connections of its own: by default LangChain keeps them for all models and loops of a process."""
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"max_retries": 0, "stream_usage": True}
    with httpx.Client() as http:
        async with httpx.AsyncClient() as async_http:
            options |= {"http_client": http, "http_async_client": async_http}
            yield ChatOpenAI(model=MODEL, base_url=f"{baton.url}/v1", api_key=SecretStr(KEY), **options)


def test_an_answer_and_its_usage(model: Any, baton: Baton) -> None:
    baton.says(TEXT)
    answer = model.invoke(QUESTION)
    assert (answer.content, answer.response_metadata["finish_reason"]) == (TEXT, "stop")
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    assert [each.content for each in model.batch([QUESTION, "And of Italy?"])] == [TEXT, TEXT]


def test_a_stream_and_its_usage(model: Any, baton: Baton) -> None:
    baton.says(TEXT)
    chunks = list(model.stream(QUESTION))
    assert len([chunk for chunk in chunks if chunk.content]) > 1
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == TEXT
    assert whole.usage_metadata["output_tokens"] > 1


def test_a_tool_is_called(model: Any, baton: Baton) -> None:
    baton.says(CALL)
    (call,) = model.bind_tools([City]).invoke(QUESTION).tool_calls
    assert (call["name"], call["args"]) == ("City", {"city": "Paris"})


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_an_answer_is_an_object(model: Any, baton: Baton, method: str) -> None:
    baton.says(CALL if method == "function_calling" else '{"city": "Paris"}')
    assert model.with_structured_output(City, method=method).invoke(QUESTION) == City(city="Paris")


def test_the_api_of_responses(model: Any, baton: Baton) -> None:
    baton.says(TEXT)
    asks = model.model_copy(update={"use_responses_api": True})
    assert asks.invoke(QUESTION).text == TEXT
    assert "".join(chunk.text for chunk in asks.stream(QUESTION)) == TEXT


@pytest.mark.parametrize(
    ("kind", "question", "asked"),
    [
        (openai.BadRequestError, QUESTION, {"temperature": -1}),
        (openai.BadRequestError, "word " * 600, {}),
        (openai.NotFoundError, QUESTION, {"model": "other"}),
        (openai.APIStatusError, "x" * MAX_BODY_BYTES, {}),
        (openai.RateLimitError, QUESTION, {"n": MAX_CLIENT_PARTS + 1}),
    ],
)
def test_an_error_is_of_openais_class(model: Any, kind: type[Exception], question: str, asked: dict[str, Any]) -> None:
    with pytest.raises(kind):
        model.bind(**asked).invoke(question)
    with pytest.raises(kind):
        list(model.bind(**asked).stream(question))


async def test_async_answers(model: Any, baton: Baton) -> None:
    baton.says(TEXT)
    assert (await model.ainvoke(QUESTION)).content == TEXT
    assert "".join([chunk.content async for chunk in model.astream(QUESTION)]) == TEXT


async def test_a_stream_that_is_left_ends_its_session(model: Any, baton: Baton) -> None:
    async with baton.left_async():
        asked = model.bind(max_tokens=400, extra_body={"ignore_eos": True})
        async with aclosing(asked.astream(QUESTION)) as stream:
            await anext(stream)
