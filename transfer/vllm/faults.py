"""What an engine says of a request that it cannot serve. vLLM's outputs say only that it ended in an error.

The scheduler asks its connector when a request has finished, and then makes the last output with the request's trace
headers. So the reason travels among them. `tests/e2e/test_serving.py` sees that it arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from transfer.vllm.continued_answer import answered

if TYPE_CHECKING:
    from vllm.v1.request import Request

FAULT = "baton-fault"
"""The trace header that holds the reason."""
_LONGEST = 500


def note_fault(request: Request) -> None:
    """Call it when a request has finished: it notes the reason of an error that the request itself has caused."""
    if request.status is RequestStatus.FINISHED_ERROR and (why := _why(request)):
        request.trace_headers = {**(request.trace_headers or {}), FAULT: why[:_LONGEST]}


def _why(request: Request) -> str:
    asked = request.structured_output_request
    if asked is None:
        return ""
    if isinstance(asked.grammar, Exception):
        return f"the grammar cannot be used: {str(asked.grammar).strip() or type(asked.grammar).__name__}"
    # A grammar that has allowed tokens before has not become wrong: then the engine is.
    is_first = request.num_output_tokens == 1 and not answered(request.sampling_params)
    return "the grammar cannot be used: no text satisfies it" if is_first else ""
