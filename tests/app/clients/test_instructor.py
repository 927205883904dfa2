"""What a user of instructor sees, blocking and async, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.app.clients.baton import KEY, MAX_CLIENT_PARTS, MODEL, Baton


class City(BaseModel):
    """A city."""

    city: str
    people: int


PARIS = {"city": "Paris", "people": 2_000_000}
JSON = '{"city": "Paris", "people": 2000000}'
CALL = f'<tool_call>\n{{"name": "City", "arguments": {JSON}}}\n</tool_call>'
ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "response_model": City,
    "max_retries": 0,
    "max_tokens": 100,
}


@pytest.fixture
def instructor() -> Any:
    import instructor

    return instructor


@pytest.fixture
def failure() -> Any:
    """What instructor raises when no answer is an object, or there is none."""
    from instructor.core import InstructorRetryException

    return InstructorRetryException


@pytest.fixture
def client(baton: Baton) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{baton.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(baton: Baton) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{baton.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON"])
def test_an_answer_is_an_object(instructor: Any, client: openai.OpenAI, baton: Baton, mode: str) -> None:
    baton.says(CALL if mode == "TOOLS" else JSON)
    asks = instructor.from_openai(client, mode=instructor.Mode[mode])
    answer, raw = asks.chat.completions.create_with_completion(**ASKED)
    assert isinstance(answer, City)
    assert answer.model_dump() == PARIS
    assert raw.usage.completion_tokens > 1


async def test_async_answers(instructor: Any, async_client: openai.AsyncOpenAI, baton: Baton) -> None:
    baton.says(JSON)
    asks = instructor.from_openai(async_client, mode=instructor.Mode.JSON_SCHEMA)
    assert (await asks.chat.completions.create(**ASKED)).model_dump() == PARIS


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_an_object_that_is_streamed(instructor: Any, client: openai.OpenAI, baton: Baton, mode: str) -> None:
    baton.says(CALL if mode == "TOOLS" else JSON)
    asks = instructor.from_openai(client, mode=instructor.Mode[mode])
    seen = [each.model_dump() for each in asks.chat.completions.create_partial(**ASKED)]
    assert len(seen) > 1
    assert seen[-1] == PARIS


def test_anthropics_api(instructor: Any, baton: Baton) -> None:
    baton.says(CALL)
    with anthropic.Anthropic(base_url=baton.url, api_key=KEY, max_retries=0) as client:
        assert instructor.from_anthropic(client).messages.create(**ASKED).model_dump() == PARIS


def test_an_answer_that_is_no_object_is_an_error(
    instructor: Any, failure: Any, client: openai.OpenAI, baton: Baton
) -> None:
    baton.says("Paris")
    asks = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    with pytest.raises(failure):
        asks.chat.completions.create(**ASKED)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.NotFoundError, {"model": "other"}),
        (openai.RateLimitError, {"n": MAX_CLIENT_PARTS + 1}),
    ],
)
def test_an_error_of_the_server_is_told(
    instructor: Any, failure: Any, client: openai.OpenAI, kind: type[Exception], asked: Any
) -> None:
    asks = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    with pytest.raises(failure) as caught:
        asks.chat.completions.create(**{**ASKED, **asked})
    assert isinstance(caught.value.__cause__, kind)


async def test_a_stream_whose_client_is_closed_ends_its_session(
    instructor: Any, async_client: openai.AsyncOpenAI, baton: Baton
) -> None:
    asks = instructor.from_openai(async_client, mode=instructor.Mode.JSON_SCHEMA)
    baton.says('{"city": "' + "Paris and " * 200)
    async with baton.left_async():
        asked = {**ASKED, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        async with aclosing(asks.chat.completions.create_partial(**asked)) as stream:
            await anext(stream)
        await async_client.close()  # closing instructor's stream alone leaves that of OpenAI's client to the collector
