"""The outputs that wait for vLLM's frontend: their order, and what of one answer is joined."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from deployments.cluster import batch as batch_module
from deployments.cluster.batch import Batch

LATE = {"new_logprobs": "of one step", "events": ["scheduled"], "mm_cache_miss_hashes": ["x"], "routed_experts": "r"}
KNOWN = {
    *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "finish_reason"),
    *("stop_reason", "events", "kv_transfer_params", "ec_transfer_params", "trace_headers", "prefill_stats"),
    *("routed_experts", "num_nans_in_logits", "mm_cache_miss_hashes", "new_sampling_mask", "spec_decode_metrics"),
    "prompt_token_id_logprobs",
}


async def test_a_message_has_what_was_added_before_it_was_asked_for_in_order() -> None:
    batch = Batch()
    outputs = [EngineCoreOutput(name, [1]) for name in "abcd"]
    asked = asyncio.create_task(batch.next())
    batch.flush()  # nothing was added, so there is no message
    batch.add(outputs[0])
    batch.add(outputs[1])
    await asyncio.sleep(0)
    assert not asked.done(), "it is not flushed"
    batch.flush()
    batch.flush()
    assert (await asked).outputs == outputs[:2]
    for output in outputs[2:]:
        batch.add(output)
        batch.flush()
    assert (await batch.next()).outputs == outputs[2:]
    again = asyncio.create_task(batch.next())
    await asyncio.sleep(0)
    assert not again.done(), "nothing comes twice"
    again.cancel()


async def test_the_tokens_of_an_answer_that_wait_are_one_output() -> None:
    batch = Batch()
    stats = PrefillStats()
    batch.add(EngineCoreOutput("a", [1], prefill_stats=stats))
    batch.add(EngineCoreOutput("b", [7]))
    batch.add(EngineCoreOutput("a", [2, 3]))
    batch.add(EngineCoreOutput("a", [4], finish_reason=FinishReason.STOP, stop_reason=4))
    batch.flush()
    assert (await batch.next()).outputs == [
        EngineCoreOutput("a", [1, 2, 3, 4], prefill_stats=stats, finish_reason=FinishReason.STOP, stop_reason=4),
        EngineCoreOutput("b", [7]),
    ]
    batch.add(EngineCoreOutput("b", [8]))
    batch.flush()
    assert (await batch.next()).outputs == [EngineCoreOutput("b", [8])]


async def test_what_else_is_ready_goes_first_for_some_turns() -> None:
    batch = Batch()
    turns = 0

    async def request() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    busy = asyncio.create_task(request())
    await asyncio.sleep(0)
    batch.add(EngineCoreOutput("a", [1]))
    batch.flush()
    before = turns
    asked = asyncio.create_task(batch.next())
    await asyncio.sleep(0)
    batch.add(EngineCoreOutput("a", [2]))
    assert (await asked).outputs == [EngineCoreOutput("a", [1, 2])]
    assert turns - before >= 10
    busy.cancel()


async def test_outputs_wait_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn takes longer than all of the time."""
    now_s = itertools.count(0.0, 2 * batch_module.LONGEST_WAIT_S)
    monkeypatch.setattr(batch_module, "monotonic", lambda: next(now_s))
    monkeypatch.setattr(batch_module, "TURNS", 10**9)
    batch = Batch()
    batch.add(EngineCoreOutput("a", [1]))
    batch.flush()
    assert (await batch.next()).outputs == [EngineCoreOutput("a", [1])]


@pytest.mark.parametrize("field", LATE)
async def test_what_belongs_to_one_step_stays_with_it(field: str) -> None:
    batch = Batch()
    plain: dict[str, Any] = {}
    outputs = [EngineCoreOutput("a", [n], **(plain if n != 2 else {field: LATE[field]})) for n in (1, 2, 3)]
    for output in outputs:
        batch.add(output)
    batch.flush()
    assert [output.new_token_ids for output in (await batch.next()).outputs] == [[1], [2], [3]]


@pytest.mark.parametrize(
    "outputs",
    [
        [EngineCoreOutput("a", [1]), EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR)],
        [EngineCoreOutput("a", [1], finish_reason=FinishReason.STOP), EngineCoreOutput("a", [2])],
    ],
    ids=["an error", "after the end"],
)
async def test_an_end_is_not_moved(outputs: list[EngineCoreOutput]) -> None:
    batch = Batch()
    for output in outputs:
        batch.add(output)
    batch.flush()
    assert (await batch.next()).outputs == outputs


def test_no_field_of_an_output_is_new() -> None:
    """Whether a new field may be lost when outputs are joined is for us to see."""
    assert {field.name for field in msgspec.structs.fields(EngineCoreOutput)} == KNOWN
