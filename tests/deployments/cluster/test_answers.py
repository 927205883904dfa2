"""The whole control plane over mock engines: answers are right, and each mode serves what its rule says.

The mock's tokens are read from the KV in its blocks, so an answer that is equal to a local one had the right KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from deployments.manager.calls import Status
from deployments.messages import Mode
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, InProcess, config, until
from tests.deployments.cluster.asking import LENGTH, STOP, Launch, prompt


@pytest.mark.parametrize("prompt_tokens", [1, 3, 4, 5, 16, 63, 64, 65, 200])
async def test_a_split_answer_is_the_local_answer(cluster: InProcess, prompt_tokens: int) -> None:
    asked = prompt(prompt_tokens)
    for max_tokens in (2, 3, 17):
        split = await cluster.answer(asked, max_tokens=max_tokens)
        assert split.context.modes == {Mode.DISAGGREGATED}
        assert split.tokens == await cluster.local(asked, max_tokens=max_tokens)
        assert (len(split.tokens), split.reason) == (max_tokens, LENGTH)
    await cluster.settle()
    received = await cluster.replicas[LARGE].counters(), await cluster.replicas[SMALL].counters()
    assert sum(each["loaded_tokens"] for each in received) == 3 * prompt_tokens


async def test_many_at_once_identical_prompts_among_them(cluster: InProcess) -> None:
    prompts = [prompt(1 + n * 3) for n in range(24)]
    prompts += [prompts[20]] * 4 + [prompts[3]] * 4
    answers = [await cluster.ask(each, max_tokens=2 + n % 12) for n, each in enumerate(prompts)]
    for answer in answers:
        await answer.over()
    for number, (each, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.tokens == await cluster.local(each, max_tokens=2 + number % 12)
        assert answer.context.modes == {Mode.DISAGGREGATED}
    await cluster.settle()
    closed = (await cluster.manager.ask(Status()))["sessions"]["closed"]
    assert closed["length"] == 2 * len(prompts)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 30])
async def test_max_tokens_is_exact(cluster: InProcess, max_tokens: int) -> None:
    asked = prompt(13)
    whole = await cluster.local(asked, max_tokens=30)
    answer = await cluster.answer(asked, max_tokens=max_tokens)
    assert answer.tokens == whole[:max_tokens]
    reasons = [output.finish_reason for output in answer.outputs]
    assert reasons == [None] * (len(reasons) - 1) + [LENGTH]
    await cluster.settle()


@pytest.mark.parametrize("place", [0, 1, 2, 9])
async def test_a_stop_token_ends_the_answer_wherever_it_is(cluster: InProcess, place: int) -> None:
    asked = prompt(22)
    whole = await cluster.local(asked, max_tokens=20)
    stopped = await cluster.answer(asked, max_tokens=20, stop_token_ids=[whole[place]])
    assert stopped.context.modes == {Mode.DISAGGREGATED}
    assert stopped.tokens == whole[: whole.index(whole[place]) + 1]
    assert (stopped.reason, stopped.stop_reason) == (STOP, whole[place])
    assert not any(output.stop_reason for output in stopped.outputs[:-1])
    await cluster.settle()


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 2, 7])
async def test_min_tokens_counts_the_first_token(cluster: InProcess, place: int, more: int) -> None:
    """A stop token that comes right after `min_tokens` ends the answer; one token earlier it is masked."""
    asked = prompt(9)
    whole = await cluster.local(asked, max_tokens=12)
    limits = {"max_tokens": 12, "min_tokens": place + more, "stop_token_ids": [whole[place]]}
    split = await cluster.answer(asked, **limits)
    assert split.context.modes == {Mode.DISAGGREGATED}
    assert split.tokens == await cluster.local(asked, **limits)
    if more:
        assert split.tokens[: place + 1] == [*whole[:place], whole[place] + 1], "what the mock samples instead"
        assert (len(split.tokens), split.reason) == (12, LENGTH)
    else:
        assert (split.tokens, split.reason) == (whole[: place + 1], STOP)
    await cluster.settle()


async def test_decode_that_answers_before_prefill_is_heard_is_held_back(cluster: InProcess) -> None:
    """Prefill's outputs are slower than the whole answer."""
    prefill = cluster.pools["prefill"]
    held: list[tuple[str, Sequence[bytes]]] = []
    prefill.held = held
    asked = prompt(10)
    answer = await cluster.ask(asked, max_tokens=5)

    async def decode_is_done() -> bool:
        counters = await cluster.replicas[SMALL].counters(), await cluster.replicas[LARGE].counters()
        return sum(each["generated_tokens"] for each in counters) == 4

    await until(decode_is_done)
    assert not answer.outputs
    prefill.held = None
    ((replica_id, frames),) = held
    cluster.core._take(replica_id, frames)
    await answer.over()
    assert len(answer.tokens) == 5
    assert answer.tokens == await cluster.local(asked, max_tokens=5)
    await cluster.settle()


@pytest.mark.parametrize(
    ("sampling", "mode", "rule"),
    [
        ({}, Mode.DISAGGREGATED, ""),
        ({"temperature": 0.7}, Mode.DISAGGREGATED, ""),
        ({"seed": 3}, Mode.DISAGGREGATED, ""),
        ({"repetition_penalty": 1.2, "min_tokens": 2, "logprobs": 2}, Mode.DISAGGREGATED, ""),
        ({"max_tokens": 1}, Mode.PREFILL_LOCAL, "one_token"),
        ({"max_tokens": 1, "seed": 3, "temperature": 1.0}, Mode.PREFILL_LOCAL, "one_token"),
        ({"seed": 3, "temperature": 0.7}, Mode.DISAGGREGATED, ""),
        ({"prompt_logprobs": 1}, Mode.DECODE_LOCAL, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, Mode.DECODE_LOCAL, "prompt_logprobs"),
        ({"presence_penalty": 0.1}, Mode.DISAGGREGATED, ""),
        ({"frequency_penalty": -0.1}, Mode.DISAGGREGATED, ""),
        ({"bad_words": ["never"]}, Mode.DISAGGREGATED, ""),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, Mode.DISAGGREGATED, ""),
        ({"thinking_token_budget": 9}, Mode.DECODE_LOCAL, "stateful_logits"),
    ],
)
async def test_modes_and_rules_are_noted(cluster: InProcess, sampling: dict[str, Any], mode: Mode, rule: str) -> None:
    answer = await cluster.answer(prompt(12), **{"max_tokens": 6, **sampling})
    assert answer.context.modes == {mode}
    assert answer.context.rules == ({rule} if rule else set())
    assert answer.context.error is None
    assert (len(answer.tokens), answer.reason) == ({"max_tokens": 6, **sampling}["max_tokens"], LENGTH)
    await cluster.settle()


async def test_a_prompt_that_is_computed_where_it_is_answered_is_backlog_until_then_only(cluster: InProcess) -> None:
    answer = await (await cluster.ask(prompt(20), max_tokens=400, prompt_logprobs=0)).has(1)

    async def is_prefilled() -> bool:
        return not (await cluster.placed(answer))["prefilling"]

    await until(is_prefilled)
    assert answer.context.modes == {Mode.DECODE_LOCAL}
    assert answer.reason is None
    await cluster.core.abort_requests_async([answer.request_id])
    await cluster.settle()


async def test_a_short_prompt_is_not_worth_splitting(launch: Launch) -> None:
    cluster = await launch(config(split_min_prompt_tokens=10))
    short, enough = await cluster.answer(prompt(9), max_tokens=4), await cluster.answer(prompt(10), max_tokens=4)
    assert (short.context.modes, enough.context.modes) == ({Mode.DECODE_LOCAL}, {Mode.DISAGGREGATED})
    assert short.context.rules == set()
    await cluster.settle()


async def test_the_prefill_replica_answers_while_no_decode_replica_is_up(launch: Launch) -> None:
    cluster = await launch(config(), [PREFILL])
    asked = prompt(21)
    alone = await cluster.answer(asked, max_tokens=9)
    assert alone.context.modes == {Mode.PREFILL_LOCAL}
    await cluster.start(SMALL, LARGE)
    assert alone.tokens == await cluster.local(asked, max_tokens=9)
    assert (await cluster.answer(asked, max_tokens=9)).context.modes == {Mode.DISAGGREGATED}
    await cluster.settle()
