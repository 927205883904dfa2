"""The outputs that wait for vLLM's frontend. What comes while the frontend is busy becomes one message."""

from __future__ import annotations

import asyncio
from time import monotonic

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

TURNS, LONGEST_WAIT_S = 12, 0.05
"""The turns of the event loop, and the longest time, in which an offer waits for everything else that is ready.

A new request takes some ten turns from its arrival to its first token. In a busy process, one turn in which hundreds of
answers get their tokens is as long as all the others together. So the new request goes first, and meanwhile more tokens
come and are joined. In an idle process twelve turns take microseconds.
"""


class Batch:
    """Outputs are added one by one; `flush` offers what was added to the frontend.

    A frontend that is behind gets the waiting tokens of an answer as one output. So it detokenises and sends them once.
    """

    def __init__(self) -> None:
        self._outputs: list[EngineCoreOutput] = []
        self._newest: dict[str, EngineCoreOutput] = {}
        self._offered = asyncio.Event()

    def add(self, output: EngineCoreOutput) -> None:
        """Add an output, which from now on belongs to the batch."""
        before = self._newest.get(output.request_id)
        if before is not None and _can_join(before, output):
            _join(before, output)
        else:
            self._newest[output.request_id] = output
            self._outputs.append(output)

    def flush(self) -> None:
        if self._outputs:
            self._offered.set()

    async def next(self) -> EngineCoreOutputs:
        """Wait for an offer, and take all that was added."""
        await self._offered.wait()
        until_s = monotonic() + LONGEST_WAIT_S
        for _ in range(TURNS):
            await asyncio.sleep(0)
            if monotonic() > until_s:
                break
        self._offered.clear()
        outputs, self._outputs = self._outputs, []
        self._newest.clear()
        return EngineCoreOutputs(outputs=outputs)


def _can_join(before: EngineCoreOutput, after: EngineCoreOutput) -> bool:
    """Whether two outputs of one answer may become one. An error stays alone: tokens before it go to the client."""
    goes_on = before.finish_reason is None and after.finish_reason is not FinishReason.ERROR
    return goes_on and _is_plain(before) and _is_plain(after)


def _is_plain(output: EngineCoreOutput) -> bool:
    """Whether it holds tokens and an end, and nothing else that belongs to one step."""
    return (
        output.new_logprobs is None
        and output.new_prompt_logprobs_tensors is None
        and output.pooling_output is None
        and output.events is None
        and output.routed_experts is None
        and output.mm_cache_miss_hashes is None
        and output.new_sampling_mask is None
        and output.prompt_token_id_logprobs is None
    )


def _join(before: EngineCoreOutput, after: EngineCoreOutput) -> None:
    """Put the later output's tokens and end behind the earlier one's. What came with the first output stays."""
    before.new_token_ids += after.new_token_ids
    before.finish_reason, before.stop_reason = after.finish_reason, after.stop_reason
    before.num_nans_in_logits += after.num_nans_in_logits
    before.prefill_stats = before.prefill_stats or after.prefill_stats
    before.trace_headers = before.trace_headers or after.trace_headers
    before.spec_decode_metrics = after.spec_decode_metrics or before.spec_decode_metrics
