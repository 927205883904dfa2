"""Requests and outputs as vLLM itself encodes and decodes them. Imports vllm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


def encode(request_id: str, prompt: Sequence[int], sampling: dict[str, Any]) -> tuple[bytes, ...]:
    """`structured_outputs` is a map here; the backend is the one that vLLM's frontend would choose for it."""
    if grammar := sampling.get("structured_outputs"):
        sampling = {**sampling, "structured_outputs": StructuredOutputsParams(**grammar)}
        sampling["structured_outputs"]._backend = "xgrammar"
    params = SamplingParams(**{"ignore_eos": True, "temperature": 0.0, **sampling})
    request = EngineCoreRequest(request_id, list(prompt), None, params, None, 0.0, None, None, None)
    return tuple(bytes(frame) for frame in MsgpackEncoder().encode(request))


def decode_outputs(frames: list[bytes]) -> list[tuple[str, list[int], int | None]]:
    outputs = MsgpackDecoder(EngineCoreOutputs).decode(frames).outputs
    return [
        (o.request_id, list(o.new_token_ids), None if o.finish_reason is None else int(o.finish_reason))
        for o in outputs
    ]
