"""A replica passes on the outputs of its engine unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.engine.vllm.outputs import OutputsDecoder, Seen, Unread, passed_on, seen

STATS = PrefillStats()
STATS.num_prompt_tokens, STATS.num_computed_tokens = 40, 30


def logprobs(tokens: int) -> LogprobsLists:
    ids = np.arange(2 * tokens, dtype=np.int32).reshape(tokens, 2)
    return LogprobsLists(ids, ids.astype(np.float32) / 7, np.arange(tokens, dtype=np.int32))


def tensors(tokens: int) -> LogprobsTensors:
    ids = torch.arange(2 * tokens).reshape(tokens, 2)
    return LogprobsTensors(ids, ids.float() / 3, torch.arange(tokens))


OUTPUTS = {
    "plain": EngineCoreOutput("a", [1, 2]),
    "last": EngineCoreOutput("b", [3], finish_reason=FinishReason.STOP, stop_reason="END"),
    "first": EngineCoreOutput("c", [4], prefill_stats=STATS, trace_headers={"a": "b"}),
    "where KV is": EngineCoreOutput("d", [5], kv_transfer_params={"do_remote_prefill": True, "blocks": [[1, 2]]}),
    "log probabilities": EngineCoreOutput("e", [6], new_logprobs=logprobs(1)),
    "many of them": EngineCoreOutput("f", [7], new_prompt_logprobs_tensors=tensors(2000)),
    "more of them": EngineCoreOutput("g", [8], new_logprobs=logprobs(3000)),
    "after all of these": EngineCoreOutput("h", [9], num_nans_in_logits=3, mm_cache_miss_hashes=["x"]),
}


def sent(*outputs: EngineCoreOutput, **fields: Any) -> list[zmq.Frame]:
    """As they come out of an engine's socket."""
    return [zmq.Frame(frame) for frame in MsgpackEncoder().encode(EngineCoreOutputs(outputs=list(outputs), **fields))]


def plain(output: EngineCoreOutput) -> dict[str, Any]:
    """Its fields, with arrays as lists."""

    def listed(value: Any) -> Any:
        if isinstance(value, np.ndarray | torch.Tensor):
            return value.tolist()
        return [listed(each) for each in value] if isinstance(value, tuple | list) else value

    return {name: listed(getattr(output, name)) for name in output.__struct_fields__}


@pytest.mark.parametrize("chosen", [*([name] for name in OUTPUTS), list(OUTPUTS), ["plain", "more of them"]], ids=str)
def test_what_is_passed_on_is_what_came(chosen: list[str]) -> None:
    came = OutputsDecoder().decode(sent(*OUTPUTS.values(), timestamp=12.5))
    raw = dict(zip(OUTPUTS, came.outputs, strict=True))
    frames = passed_on([raw[name] for name in chosen], came)
    message = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    assert message.timestamp == 12.5, "by the engine's clock"
    arrived = message.outputs
    assert [plain(output) for output in arrived] == [plain(OUTPUTS[name]) for name in chosen]


def test_a_replica_reads_what_it_needs() -> None:
    came = OutputsDecoder().decode(sent(*OUTPUTS.values()))
    assert len(came.buffers) > 0, "the large arrays travel beside the message"
    read = dict(zip(OUTPUTS, map(seen, came.outputs), strict=True))
    assert {name: (each.request_id, each.new_token_ids) for name, each in read.items()} == {
        name: (output.request_id, output.new_token_ids) for name, output in OUTPUTS.items()
    }
    assert [name for name, each in read.items() if each.finish_reason is not None] == ["last"]
    assert read["first"].prefill_stats == STATS
    assert read["where KV is"].kv_transfer_params == OUTPUTS["where KV is"].kv_transfer_params


def test_what_is_not_of_a_request_is_there_too() -> None:
    stats = SchedulerStats(num_running_reqs=3, kv_cache_usage=0.5)
    came = OutputsDecoder().decode(sent(OUTPUTS["plain"], scheduler_stats=stats, finished_requests={"a"}))
    assert came.scheduler_stats == stats
    assert came.finished_requests == {"a"}
    assert (came.utility_output, came.buffers) == (None, ())


def test_the_structs_have_vllms_fields_in_vllms_order() -> None:
    assert (*EngineCoreOutputs.__struct_fields__, "buffers") == Unread.__struct_fields__
    assert EngineCoreOutput.__struct_fields__[: len(Seen.__struct_fields__)] == Seen.__struct_fields__
