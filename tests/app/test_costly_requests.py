"""What costs vLLM's server much: it is refused early, or checked apart. The server is vLLM's real frontend."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from vllm.v1.engine.input_processor import InputProcessor

from app.frontend import build_server
from app.turns import BUSY
from configs.schema import BatonConfig
from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, DEFAULT_SOURCE, resolve
from tests.app.test_frontend import MODEL, TEXT, FakeCore, Server

SAYS = {"role": "user", "content": "hi"}
GRAMMAR: dict[str, Any] = {"structured_outputs": {"grammar": 'root ::= "a"'}}
MOST_FAULTS = 300
"""Of one thing that is wrong. An item of an `input` may be of many kinds, and has a fault or more for each of them."""
PATIENCE_S = 60.0
LONGEST = 4096
"""Characters of a grammar."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Server]:
    ingress = {"refusals_per_s": 0, "max_grammar_characters": LONGEST, "default_max_tokens": 8}
    config = BatonConfig.model_validate({"prefill": {}, "decode": {"main": {}}, "ingress": ingress})
    path, core = Path(resolve(DEFAULT_SOURCE, DEFAULT_CACHE_DIR)), FakeCore()
    llm, app = await build_server(config, str(path), core)
    core.script = [*llm.get_tokenizer().encode(TEXT), llm.get_tokenizer().eos_token_id]
    server = Server(llm, app, core, config)
    yield server
    await server.http.aclose()
    llm.shutdown()
    assert llm.output_handler is not None
    await asyncio.wait([llm.output_handler], timeout=PATIENCE_S)


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.core.reset()
    yield running
    assert running.llm.get_num_unfinished_requests() == 0
    assert running.llm.input_processor._found == {}, "nothing is kept of what was checked"


async def ask(server: Server, path: str = "/v1/completions", key: str = "", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    prompt = {"prompt": "a"} if path == "/v1/completions" else {}
    return await server.http.post(path, json={"model": MODEL, **prompt, **body}, headers=headers)


# ---- checked until the first fault


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{}] * 1000}),
        ("/v1/responses", {"input": [*[SAYS] * 200, {"type": "odd"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "odd"}] * 500}]}),
        ("/v1/chat/completions", {"messages": [SAYS], "tools": [{"type": "function"}] * 1000}),
        ("/v1/completions", {"prompt": [*[7] * 100_000, "a"]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "odd"}] * 500}]}),
    ],
)
async def test_a_body_with_many_faults_is_told_the_first(server: Server, path: str, body: dict[str, Any]) -> None:
    refused = await ask(server, path, **body)
    assert refused.status_code == 400
    found = re.match(r"(\d+) validation error", refused.json()["error"]["message"])
    assert found
    assert 0 < int(found[1]) < MOST_FAULTS
    assert server.core.requests == []


async def test_what_is_refused_early_is_refused_as_vllm_does(server: Server) -> None:
    """A field that is wrong is told in the same words in a short body and in a long one."""
    short = await ask(server, temperature="hot")
    long = await ask(server, temperature="hot", prompt=["a"] * 256, logit_bias={str(each): 1 for each in range(300)})
    assert (long.status_code, long.json()["error"]) == (short.status_code, short.json()["error"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [SAYS] * 100}),
        ("/v1/chat/completions", {"messages": [SAYS] * 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": [SAYS] * 100}),
        ("/v1/completions", {"prompt": ["a"] * 200}),
    ],
)
async def test_a_long_body_without_a_fault_is_served(server: Server, path: str, body: dict[str, Any]) -> None:
    """The same body comes to the core as without the early check."""
    assert (await ask(server, path, **body)).status_code == 200
    prompts = [request.prompt_token_ids for request in server.core.requests]
    assert len(prompts) == (200 if path == "/v1/completions" else 1)
    assert all(prompts)


async def test_a_text_that_no_prompt_can_be_is_not_tokenised(server: Server) -> None:
    longest = server.llm.model_config.max_model_len * server.llm.get_tokenizer().max_chars_per_token
    refused = await ask(server, "/tokenize", prompt="a " * longest)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await ask(server, "/tokenize", prompt="a " * 1000)).status_code == 200


# ---- grammars are checked apart


class Gate:
    """vLLM's check of parameters, which waits while `go` is clear. `threads`: where it ran, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.came, self.go = threading.Semaphore(0), threading.Event()
        theirs = InputProcessor._validate_params

        def check(processor: InputProcessor, params: Any, tasks: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            if params.structured_outputs is not None:
                self.came.release()
                assert self.go.wait(PATIENCE_S)
            return theirs(processor, params, tasks)

        monkeypatch.setattr(InputProcessor, "_validate_params", check)

    async def has_one(self) -> None:
        assert await asyncio.to_thread(self.came.acquire, timeout=PATIENCE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.go.set()


async def test_others_are_served_while_a_grammar_is_checked(server: Server, gate: Gate) -> None:
    asked = asyncio.create_task(ask(server, **GRAMMAR))
    await gate.has_one()
    assert (await ask(server)).status_code == 200
    assert not asked.done()
    gate.go.set()
    assert (await asked).status_code == 200
    assert len(gate.threads) == 2, "and it is not checked once more"
    assert gate.threads[0].startswith("baton-grammar")
    assert gate.threads[1] == threading.current_thread().name


async def test_a_request_that_leaves_while_its_grammar_is_checked_lets_the_next_one_come(
    server: Server, gate: Gate
) -> None:
    asked = asyncio.create_task(ask(server, **GRAMMAR))
    await gate.has_one()
    asked.cancel()
    gate.go.set()
    await asyncio.wait([asked])
    assert (await ask(server, **GRAMMAR)).status_code == 200


async def test_a_client_with_many_grammars_is_told_to_wait(
    server: Server, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.llm.input_processor._turns, "_most_waiting", 1)
    asked = [asyncio.create_task(ask(server, key="a", **GRAMMAR))]
    await gate.has_one()
    asked += [asyncio.create_task(ask(server, key="a", **GRAMMAR)) for _ in range(2)]
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    other = asyncio.create_task(ask(server, key="b", **GRAMMAR))
    gate.go.set()
    refused = next(iter(done)).result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, BUSY)
    assert refused.headers["retry-after"] == "1"
    assert sorted([(await each).status_code for each in asked]) == [200, 200, 429]
    assert (await other).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "wanted",
    [
        {"structured_outputs": {"grammar": "root ::= " + '"a" ' * 2000}},
        {"structured_outputs": {"choice": ["a" * 100] * 100}},
        {"structured_outputs": {"regex": "a" * 5000}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab"] * 1000}}}},
        {"structured_outputs": {"grammar": "root ::= odd"}},
        {"structured_outputs": {"json": {"type": "nonsense"}}},
    ],
)
async def test_a_grammar_that_is_too_long_or_wrong_is_refused(
    server: Server, wanted: dict[str, Any], stream: bool
) -> None:
    refused = await ask(server, stream=stream, **wanted)
    assert refused.status_code == 400, refused.text
    assert (refused.json()["error"]["code"] == "grammar_too_long") == (len(str(wanted)) > LONGEST)
    assert server.core.requests == []


async def test_a_schema_still_reaches_the_core(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert (await ask(server, structured_outputs={"json": schema})).status_code == 200
    assert server.core.requests[0].sampling_params.structured_outputs.json == schema
