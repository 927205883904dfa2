"""The wire format of vLLM's engine core, as far as the mock engine needs it, without importing vLLM.

Requests are read and outputs are written by position, as vLLM encodes its array-like structs.
tests/deployments/engine/mock/test_wire.py compares both with the installed vLLM: it fails when a field has moved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from deployments.messages import Bring

RAW_VIEW = 3  # vLLM's msgpack extension for the bytes of an array


class FinishReason(IntEnum):
    """vLLM's codes for why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class Handoff(msgspec.Struct, frozen=True):
    """A request's part in a handoff: the `kv_transfer_params["baton"]` that the vLLM connector reads."""

    role: str
    session: str
    epoch: int
    peers: list[str]

    @property
    def key(self) -> tuple[str, int]:
        return (self.session, self.epoch)


class KVTransferParams(msgspec.Struct, frozen=True):
    baton: Handoff | None = None


class Pinning(msgspec.Struct, frozen=True):
    """What a request pins: the `extra_args["baton_pin"]` that `transfer/vllm/pins.py` reads."""

    id: str
    keep: list[str]


class ExtraArgs(msgspec.Struct, frozen=True):
    kv_transfer_params: KVTransferParams | None = None
    baton_pin: Pinning | None = None
    baton_answered: list[int] = []
    baton_tpot_s: float = 0.0


class Sampling(msgspec.Struct, frozen=True):
    """The fields of vLLM's SamplingParams that the mock engine respects. They travel as a map without defaults."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    extra_args: ExtraArgs | None = None


class Request(msgspec.Struct, frozen=True, array_like=True):
    """The leading fields of vLLM's EngineCoreRequest. Later fields are ignored."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: Any
    sampling_params: Sampling

    @property
    def handoff(self) -> Handoff | None:
        extra = self.sampling_params.extra_args
        return extra.kv_transfer_params.baton if extra and extra.kv_transfer_params else None

    @property
    def answered(self) -> list[int]:
        """The answer's tokens that another engine sampled, as `transfer/vllm/continued_answer.py` reads them."""
        extra = self.sampling_params.extra_args
        return extra.baton_answered if extra else []

    @property
    def pinning(self) -> Pinning | None:
        """What it pins and unpins; None: nothing."""
        extra = self.sampling_params.extra_args
        return extra.baton_pin if extra else None

    @property
    def tpot_s(self) -> float:
        """The TPOT objective of its class in seconds; 0: none."""
        extra = self.sampling_params.extra_args
        return extra.baton_tpot_s if extra else 0.0


class OutputStruct(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The leading fields of vLLM's EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class OutputsStruct(msgspec.Struct, frozen=True, array_like=True):
    """The leading fields of vLLM's EngineCoreOutputs."""

    engine_index: int
    outputs: list[OutputStruct]
    scheduler_stats: Any
    timestamp: float


_REQUEST = msgspec.msgpack.Decoder(Request)
_OUTPUTS = msgspec.msgpack.Encoder()


def brought_request(request: Request, bring: Bring) -> Request:
    """The request that brings the KV of the beginning of its prompt."""
    tokens = [*request.prompt_token_ids[: bring.tokens], 0]  # the last token is computed, for an output
    return Request(bring.id, tokens, None, Sampling(max_tokens=1))


def decode_request(frames: Sequence[bytes]) -> Request:
    """Read an encoded EngineCoreRequest. Raises ValueError for other frames, or when it holds no token ids."""
    return _REQUEST.decode(frames[0])


def encode_outputs(outputs: list[OutputStruct]) -> list[bytes]:
    """Frames of an EngineCoreOutputs message."""
    return [_OUTPUTS.encode(OutputsStruct(0, outputs, None, time.monotonic()))]


def logprobs(token: int, alternatives: int) -> list[Any]:
    """The LogprobsLists of one sampled token: the token, then made-up alternatives of falling probability."""
    tokens = np.array([[token, *(token + 1 + i for i in range(alternatives))]], dtype=np.int32)
    values = [[math.log(0.5) * (rank + 1) for rank in range(alternatives + 1)]]
    ranks = np.array([1], dtype=np.int32)
    return [_array(tokens), _array(np.array(values, dtype=np.float32)), _array(ranks), None]


def _array(array: np.ndarray[Any, Any]) -> list[Any]:
    return [array.dtype.str, array.shape, msgspec.msgpack.Ext(RAW_VIEW, array.tobytes())]
