"""What the users of other clients than OpenAI's get from real engines: objects, tools, cached prompts, an early end."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field, SecretStr

from tests.e2e.client import MODEL, TIMEOUT_S
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("only_loopback")]

KEY = "none"
BLOCK = 128
QUESTION = "What is the capital of France?"
ASKED: Any = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    """A city."""

    city: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor_gets_an_object(baton: Cluster, mode: str) -> None:
    import instructor

    with openai.OpenAI(base_url=f"{baton.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        asks = instructor.from_openai(client, mode=instructor.Mode[mode])
        asked = {"model": MODEL, "messages": ASKED, "max_tokens": 80, "temperature": 0}
        city = asks.chat.completions.create(response_model=City, max_retries=0, **asked)
    assert isinstance(city, City)


def test_anthropics_client_sees_cached_prompts_and_leaves_a_stream(baton: Cluster) -> None:
    asked: Any = {"model": MODEL, "system": "You know every city. " * 60, "messages": ASKED}
    with anthropic.Anthropic(base_url=baton.url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        counted = client.messages.count_tokens(**asked)
        first, again = (client.messages.create(max_tokens=8, extra_body={"temperature": 0}, **asked) for _ in range(2))
        assert again.content == first.content
        assert (again.usage.cache_read_input_tokens or 0) >= BLOCK
        with client.messages.stream(max_tokens=1000, extra_body={"ignore_eos": True}, **asked) as stream:
            next(stream.text_stream)
    assert counted.input_tokens > 2 * BLOCK
    baton.settled()
    assert baton.used_blocks() == 0


def test_langchain_gets_an_object_and_a_stream(baton: Cluster) -> None:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"max_retries": 0, "stream_usage": True, "timeout": TIMEOUT_S, "temperature": 0}
    model = ChatOpenAI(model=MODEL, base_url=f"{baton.url}/v1", api_key=SecretStr(KEY), max_tokens=80, **options)
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke(QUESTION), City)
    chunks = list(model.bind(max_tokens=16).stream(QUESTION))
    assert "Paris" in "".join(str(chunk.content) for chunk in chunks)
    usage: Any = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata][-1]
    assert usage["output_tokens"] > 1


def test_litellm_gets_a_tool_call_and_a_stream(baton: Cluster) -> None:
    import litellm

    ask: Any = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{baton.url}/v1", "api_key": KEY, "messages": ASKED}
    ask |= {"temperature": 0, "max_retries": 0, "timeout": TIMEOUT_S}
    function = {"name": "city", "description": "A city", "parameters": City.model_json_schema(), "strict": True}
    choice = {"type": "function", "function": {"name": "city"}}
    tools = [{"type": "function", "function": function}]
    answer: Any = litellm.completion(tools=tools, tool_choice=choice, max_tokens=80, **ask)
    (call,) = answer.choices[0].message.tool_calls
    City.model_validate(json.loads(call.function.arguments))
    stream: Any = litellm.completion(stream=True, max_tokens=16, **ask)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
