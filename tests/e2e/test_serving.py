"""A real model through separate prefill and decode replicas: the answers, and the proof that they were split."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import client_of, complete, tokens
from tests.e2e.cluster import Cluster, total
from tests.e2e.conftest import ANSWER_TOKENS, CROWD, LENGTHS, prompt, questions
from tests.e2e.settings import cpu_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK_TOKENS = 128
LAYERS = 30
TRIES = 5
# Keys and values of 3 heads of 64 float32 numbers for every token of a block.
BLOCK_BYTES = BLOCK_TOKENS * 3 * 64 * 2 * 4


def blocks(length: int) -> int:
    return -(-length // BLOCK_TOKENS)


async def test_it_knows_the_capital_of_france(baton: Cluster) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    request = {"model": "smollm2-135m-instruct", "messages": question, "max_tokens": 32, "temperature": 0}
    async with client_of(baton) as client:
        response = await client.post("/v1/chat/completions", json=request)
    assert "Paris" in response.json()["choices"][0]["message"]["content"]
    assert response.headers["x-baton-mode"] == "disaggregated"
    assert "x-baton-rule" not in response.headers


@pytest.mark.parametrize("length", LENGTHS)
async def test_greedy_answers_equal_one_plain_engines(
    baton: Cluster, reference: dict[str, list[int]], length: int
) -> None:
    """First from nothing, then from the prefix caches; and every block that decode lacked came over the channel."""
    asked, _ = questions()[f"length-{length}"]
    before = await asyncio.to_thread(baton.settled)
    async with client_of(baton) as client:
        first = await tokens(client, asked, ANSWER_TOKENS)
        after = await asyncio.to_thread(baton.settled)
        again = await tokens(client, asked, ANSWER_TOKENS, stream=True)
    assert first == reference[f"length-{length}"]
    assert again == first

    def grew(role: str, counter: str) -> float:
        return total(after, role, counter) - total(before, role, counter)

    assert grew("prefill", "bytes_written") == LAYERS * blocks(length) * BLOCK_BYTES
    assert grew("prefill", "computed_tokens") == length
    assert grew("decode", "loaded_tokens") == length
    assert grew("decode", "computed_tokens") == 0
    assert grew("decode", "handoffs_received") == 1


async def test_a_repeated_prompt_moves_only_what_decode_lacks(baton: Cluster, reference: dict[str, list[int]]) -> None:
    """The decode replica that has the prompt's full blocks cached is not offered them again."""
    asked = prompt(77, 3 * BLOCK_TOKENS + 5)
    async with client_of(baton) as client:
        first = await tokens(client, asked, ANSWER_TOKENS)
        before = await asyncio.to_thread(baton.settled)
        assert await tokens(client, asked, ANSWER_TOKENS) == first
    after = await asyncio.to_thread(baton.settled)

    def grew(role: str, counter: str) -> float:
        return total(after, role, counter) - total(before, role, counter)

    cached = grew("decode", "cached_tokens")
    assert cached in (0, 3 * BLOCK_TOKENS)  # the same decode replica, or the other one
    missing = len(asked) - cached
    assert grew("decode", "loaded_tokens") == missing
    assert grew("prefill", "bytes_written") == LAYERS * blocks(int(missing)) * BLOCK_BYTES
    assert grew("prefill", "computed_tokens") == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_sixteen_at_once_equal_one_plain_engines(
    baton: Cluster, reference: dict[str, list[int]], stream: bool
) -> None:
    asked = questions()
    async with client_of(baton) as client:
        answers = await asyncio.gather(
            *(tokens(client, asked[f"crowd-{i}"][0], ANSWER_TOKENS, stream) for i in range(CROWD))
        )
    assert list(answers) == [reference[f"crowd-{i}"] for i in range(CROWD)]


async def test_identical_prompts_at_the_same_moment(baton: Cluster, reference: dict[str, list[int]]) -> None:
    asked, _ = questions()["length-257"]
    async with client_of(baton) as client:
        answers = await asyncio.gather(*(tokens(client, asked, ANSWER_TOKENS) for _ in range(4)))
    assert answers == [reference["length-257"]] * 4


async def test_layers_are_written_while_prefill_computes(baton: Cluster) -> None:
    """Of one long prompt, all layers' writes but the last few end inside the forward pass, and decode offers before it.

    Nothing waits for either, so a process that stood still for a moment is late, and another prompt is tried.
    """
    tries = []
    for seed in range(4242, 4242 + TRIES):
        before = {line.get("session", "") for line in await asyncio.to_thread(_timeline, baton.trace_dir)}
        async with client_of(baton) as client:
            response = await complete(client, prompt(seed, 1500), 4)
            assert response.status_code == 200
        ours = await asyncio.to_thread(_handoff, baton.trace_dir, before)
        begin = min(line["t"] for line in ours if line["event"] == "forward_begin")
        end = max(line["t"] for line in ours if line["event"] == "forward_end")
        written = [line["t"] for line in ours if line["event"] == "layer_written"]
        assert all(line["ok"] for line in ours if line["event"] == "layer_written")
        assert len(written) >= LAYERS * 2  # chunk by chunk
        assert all(t > begin for t in written)
        late = sum(t > end for t in written)
        offered = min(line["t"] for line in ours if line["event"] == "offered")
        tries.append(f"{late} of {len(written)} writes ended after the forward pass, offered {offered - begin:.3f} s")
        if late <= 3 and offered < begin:
            return
    raise AssertionError(tries)


def _handoff(directory: Path, before: set[str]) -> list[dict[str, Any]]:
    """The events of the one session that was not there before, once its whole prompt of 1500 tokens is computed."""
    deadline = time.monotonic() + 60.0
    while True:
        ours = [line for line in _timeline(directory) if line.get("session", "") not in {"", *before}]
        if any(line["event"] == "forward_end" and line["computed"] == 1500 for line in ours):
            (_,) = {line["session"] for line in ours}
            return ours
        assert time.monotonic() < deadline, ours
        time.sleep(0.05)


def _timeline(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in directory.glob("*.jsonl") for line in file.read_text().splitlines()]


async def test_both_decode_pools_serve_under_load(baton: Cluster) -> None:
    """More at once than the large pool takes; fewer it may have all for itself, where it was the faster one so far."""
    count = cpu_config().decode["large"].engine.max_num_seqs + 4
    before = await asyncio.to_thread(baton.settled)
    async with client_of(baton) as client:
        answers = await asyncio.gather(*(complete(client, prompt(500 + i, 60), 24) for i in range(count)))
    assert [answer.status_code for answer in answers] == [200] * count
    after = await asyncio.to_thread(baton.settled)
    for pool in ("decode-small", "decode-large"):
        counter = "generated_tokens"
        assert total(after, "decode", counter, pool) > total(before, "decode", counter, pool), pool
    assert total(after, "decode", "preemptions") == 0


async def test_a_prompt_too_big_for_small_goes_to_large(baton: Cluster) -> None:
    before = await asyncio.to_thread(baton.settled)
    async with client_of(baton) as client:
        answers = await asyncio.gather(*(complete(client, prompt(900 + i, 1100), 2) for i in range(2)))
    assert [answer.status_code for answer in answers] == [200] * 2
    after = await asyncio.to_thread(baton.settled)
    assert total(after, "decode", "loaded_tokens", "decode-small") == total(
        before, "decode", "loaded_tokens", "decode-small"
    )
    assert total(after, "decode", "loaded_tokens", "decode-large") > total(
        before, "decode", "loaded_tokens", "decode-large"
    )


RULES: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 1}, "prefill_local", "one_token"),
    ({"prompt_logprobs": 1}, "decode_local", "prompt_logprobs"),
]


@pytest.mark.parametrize(("more", "mode", "rule"), RULES, ids=[rule for _, _, rule in RULES])
async def test_what_cannot_be_split_is_served_on_one_replica(
    baton: Cluster, more: dict[str, Any], mode: str, rule: str
) -> None:
    async with client_of(baton) as client:
        response = await complete(client, prompt(31, 40), **({"max_tokens": 6} | more))
    assert response.status_code == 200, response.text
    assert response.headers["x-baton-mode"] == mode
    assert response.headers["x-baton-rule"] == rule
    status = await asyncio.to_thread(baton.status)
    assert status["ingress"]["rules"][rule] >= 1


async def test_readiness_and_deployments(baton: Cluster) -> None:
    async with client_of(baton) as client:
        ready = await client.get("/ready")
        health = await client.get("/health")
    assert (health.status_code, ready.status_code) == (200, 200)
    assert set(ready.json()["pools"]) == {"prefill", "decode-small", "decode-large"}
    phases = [replica["phase"] for pool in ready.json()["pools"].values() for replica in pool["replicas"].values()]
    assert phases == ["ready"] * 3
    applications = await asyncio.to_thread(_applications, baton)
    assert applications["baton"]["status"] == "RUNNING"
    assert set(applications["baton"]["deployments"]) == {
        "ingress",
        "session-manager",
        "prefill",
        "decode-small",
        "decode-large",
        "stored-responses",
    }


def _applications(baton: Cluster) -> dict[str, Any]:
    from app.launch.serve_api import ServeApi

    found: dict[str, Any] = ServeApi(baton.dashboard_url).details()["applications"]
    return found


async def test_a_bad_request_harms_no_other(baton: Cluster) -> None:
    before = await asyncio.to_thread(baton.settled)
    async with client_of(baton) as client:
        wrong = [
            await client.post("/v1/completions", content=b"{"),
            await complete(client, prompt(1, 5), 4, model="unknown"),
            await complete(client, prompt(1, 2100), 4),
            await complete(client, prompt(1, 5), 4, temperature=-1),
            await client.post("/v1/completions", content=b"x" * (5 * 1024 * 1024)),
        ]
    assert [response.status_code for response in wrong] == [400, 404, 400, 400, 413]
    assert all(isinstance(response.json()["error"]["message"], str) for response in wrong)
    after = await asyncio.to_thread(baton.settled)
    assert after["modes"] == before["modes"], "a bad request reached the session manager"


async def test_a_grammar_that_refers_to_itself_is_refused_once(baton: Cluster) -> None:
    """Validation does not find it; an engine does. The other engines are not asked, and none is the worse for it."""
    before = await asyncio.to_thread(baton.settled)
    cyclic = {"type": "json_schema", "json_schema": {"name": "loop", "schema": {"$ref": "#"}}}
    async with client_of(baton) as client:
        wrong = [
            await complete(client, prompt(1, 5), 4, structured_outputs={"grammar": "root ::= root"}),
            await complete(client, prompt(1, 5), 4, response_format=cyclic),
        ]
        assert (await complete(client, prompt(1, 5), 4)).status_code == 200
    assert [(each.status_code, each.json()["error"]["code"]) for each in wrong] == [(400, "request_refused")] * 2
    assert all("the grammar cannot be used: " in each.json()["error"]["message"] for each in wrong)
    after = await asyncio.to_thread(baton.settled)
    assert sum(after["modes"].values()) == sum(before["modes"].values()) + 3, "each was placed once"


async def test_request_ids_go_in_and_out(baton: Cluster) -> None:
    async with client_of(baton) as client:
        response = await client.post(
            "/v1/completions",
            json={"model": "smollm2-135m-instruct", "prompt": "Hi", "max_tokens": 2},
            headers={"X-Request-Id": "my-id-1"},
        )
    assert response.headers.get_list("x-request-id") == ["my-id-1"]
    assert "my-id-1" in response.json()["id"]
