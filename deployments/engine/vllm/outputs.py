"""An engine's outputs as a replica passes them on: it reads what it needs of each, and forwards the engine's own bytes.

The structs here repeat vLLM's by position. tests/deployments/engine/vllm/test_outputs.py compares them with vLLM's.
"""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.v1.engine import UtilityOutput
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder

UNREAD = msgspec.Raw(b"")


class Unread(msgspec.Struct, array_like=True, gc=False):
    """vLLM's EngineCoreOutputs, with the outputs as they came.

    `buffers`: the frames after the first, to which outputs may refer by number. They come beside the message.
    """

    engine_index: int = 0
    outputs: list[msgspec.Raw] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None
    buffers: tuple[bytes, ...] = ()


class Seen(msgspec.Struct, array_like=True, gc=False):
    """The leading fields of vLLM's EngineCoreOutput, as far as a replica reads them."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: msgspec.Raw = UNREAD
    new_prompt_logprobs_tensors: msgspec.Raw = UNREAD
    pooling_output: msgspec.Raw = UNREAD
    finish_reason: int | None = None
    stop_reason: msgspec.Raw = UNREAD
    events: msgspec.Raw = UNREAD
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: msgspec.Raw = UNREAD
    trace_headers: msgspec.Raw = UNREAD
    prefill_stats: PrefillStats | None = None


class _Passed(msgspec.Struct, array_like=True, gc=False):
    """The beginning of an EngineCoreOutputs; vLLM gives the rest its defaults."""

    engine_index: int
    outputs: list[msgspec.Raw]
    scheduler_stats: None
    timestamp: float


_SEEN = msgspec.msgpack.Decoder(Seen)
_ENCODER = msgspec.msgpack.Encoder()


class OutputsDecoder(MsgpackDecoder):
    """Takes the place of an engine-core client's decoder."""

    def __init__(self) -> None:
        super().__init__(Unread)

    def decode(self, bufs: Any) -> Any:
        outputs = super().decode(bufs)
        if not isinstance(bufs, bytes | bytearray | memoryview) and len(bufs) > 1:
            outputs.buffers = tuple(bytes(memoryview(buffer)) for buffer in bufs[1:])
        return outputs


def seen(output: msgspec.Raw) -> Seen:
    """What a replica reads of an output."""
    return _SEEN.decode(output)


def passed_on(outputs: list[msgspec.Raw], came: Unread) -> list[bytes]:
    """Some outputs of one message as the frames of an EngineCoreOutputs message."""
    return [_ENCODER.encode(_Passed(0, outputs, None, came.timestamp)), *came.buffers]
