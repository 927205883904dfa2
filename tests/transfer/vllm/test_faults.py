"""What an engine says of a request that it could not serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request, RequestStatus

from transfer.vllm.faults import FAULT, note_fault


def finished(status: RequestStatus, grammar: Any, sampled: int, answered: int = 0) -> Request:
    extra = {"baton_answered": [1] * answered} if answered else None
    wanted = StructuredOutputsParams(grammar="root ::= root")
    request = Request("r", [1, 2], SamplingParams(structured_outputs=wanted, extra_args=extra), None)
    request.append_output_token_ids([5] * (sampled + answered))
    assert request.structured_output_request is not None
    request.structured_output_request.grammar = grammar
    request.status = status
    request.trace_headers = {"traceparent": "x"}
    note_fault(request)
    return request


@pytest.mark.parametrize(
    ("grammar", "sampled", "why"),
    [
        (ValueError("line 1: what is this?"), 0, "the grammar cannot be used: line 1: what is this?"),
        (ValueError(), 0, "the grammar cannot be used: ValueError"),
        (SimpleNamespace(), 1, "the grammar cannot be used: no text satisfies it"),
        (ValueError("x" * 9000), 0, ("the grammar cannot be used: " + "x" * 9000)[:500]),
    ],
)
def test_a_request_is_to_blame_for_its_grammar(grammar: Any, sampled: int, why: str) -> None:
    headers = finished(RequestStatus.FINISHED_ERROR, grammar, sampled).trace_headers
    assert headers == {"traceparent": "x", FAULT: why}


@pytest.mark.parametrize(
    ("status", "grammar", "sampled", "answered"),
    [
        (RequestStatus.FINISHED_ERROR, SimpleNamespace(), 0, 0),  # its KV cache did not arrive
        (RequestStatus.FINISHED_ERROR, SimpleNamespace(), 2, 0),  # it had allowed a token before
        (RequestStatus.FINISHED_ERROR, SimpleNamespace(), 1, 3),  # the same, in another engine
        (RequestStatus.FINISHED_STOPPED, SimpleNamespace(), 1, 0),
        (RequestStatus.FINISHED_ABORTED, ValueError("late"), 0, 0),
    ],
)
def test_a_request_is_not_to_blame(status: RequestStatus, grammar: Any, sampled: int, answered: int) -> None:
    assert finished(status, grammar, sampled, answered).trace_headers == {"traceparent": "x"}


def test_a_request_without_a_grammar_is_not_to_blame() -> None:
    request = Request("r", [1, 2], SamplingParams(), None)
    request.status = RequestStatus.FINISHED_ERROR
    note_fault(request)
    assert request.trace_headers is None
