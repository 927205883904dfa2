"""What the tests of the cluster core ask for, and how an answer fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from deployments.errors import SessionError
from load_tests.harness.control_plane import Answer

Launch = Callable[..., Any]
LENGTH, STOP, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR
ONE_SEAT = {"max_num_seqs": 1}
_random = random.Random(5)


def prompt(tokens: int) -> list[int]:
    """A prompt that was not there before."""
    return [_random.randint(100, 40_000) for _ in range(tokens)]


def assert_failed(answer: Answer, error: type[SessionError]) -> None:
    assert answer.reason is ERROR
    assert type(answer.context.error) is error, answer.context.error


def forged(request_id: str, **fields: Any) -> bytes:
    outputs = [EngineCoreOutput(request_id, [1, 2, 3], **fields)]
    return msgspec.msgpack.encode(EngineCoreOutputs(outputs=outputs))
