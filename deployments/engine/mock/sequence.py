"""A request in the mock engine: its tokens, its blocks, and when it is over."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Frames
from dataclasses import dataclass, field

import msgspec
import numpy as np

from deployments.engine.mock.memory import MockMemory
from deployments.engine.mock.wire import FinishReason, OutputStruct, Request, decode_request, logprobs
from deployments.engine.protocol import Output, RequestRefused
from transfer.channel.layers import Chunk


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens`: prompt and answer. The first `computed` of them have KV in `blocks`. `chain`: the hash of these.

    `generated`: the number of tokens of the answer, including those that another engine sampled.
    """

    request: Request
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    chain: int = 0
    generated: int = 0
    has_loaded: bool = False
    is_over: bool = False

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """The sequence of a new request."""
        return cls(request, [*request.prompt_token_ids, *request.answered], generated=len(request.answered))

    @classmethod
    def decoded(cls, frames: Frames[bytes]) -> Sequence:
        """The sequence of an encoded request. Raises RequestRefused."""
        try:
            return cls.of(decode_request(frames))
        except msgspec.DecodeError as error:
            raise RequestRefused(f"not a request of token ids: {error}") from error

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens to compute before the first new one: the prompt, and those answered elsewhere."""
        return len(self.request.prompt_token_ids) + len(self.request.answered)

    @property
    def sends(self) -> bool:
        """Whether its KV goes to a decode replica."""
        return self.request.handoff is not None and self.request.handoff.role == "prefill"

    @property
    def must_load(self) -> bool:
        """Whether its KV has yet to come from a prefill replica."""
        handoff = self.request.handoff
        return handoff is not None and handoff.role == "decode" and not self.has_loaded

    def chunk(self, count: int) -> Chunk | None:
        """The chunk that a step of `count` tokens adds to a prompt that is sent. None when it adds nothing."""
        handoff, prompt = self.request.handoff, self.prompt_tokens
        if handoff is None or not self.sends or self.computed >= prompt:
            return None
        computed = min(self.computed + count, prompt)
        return Chunk(handoff.key, self.request_id, computed, prompt, tuple(self.blocks))

    def allowed(self, token: int) -> int:
        """The token, or before `min_tokens` the next one that does not stop the answer. vLLM masks such tokens."""
        sampling = self.request.sampling_params
        if self.generated < sampling.min_tokens:
            while token == sampling.eos_token_id or token in (sampling.stop_token_ids or ()):
                token += 1
        return token

    def append(self, token: int, max_model_len: int) -> Output:
        """Add a sampled token. The reasons to end the request are checked in the order of vLLM's check_stop."""
        self.tokens.append(token)
        self.generated += 1
        sampling = self.request.sampling_params
        limit = max_model_len if sampling.max_tokens is None else sampling.max_tokens
        if token == sampling.eos_token_id and not sampling.ignore_eos:
            return self.output([token], FinishReason.STOP)
        if token in (sampling.stop_token_ids or ()):
            return self.output([token], FinishReason.STOP, token)
        if self.generated >= limit or len(self.tokens) >= max_model_len:
            return self.output([token], FinishReason.LENGTH)
        return self.output([token])

    def output(self, tokens: list[int], reason: FinishReason | None = None, stop_reason: int | None = None) -> Output:
        """This request's part of a step's outputs."""
        wanted = self.request.sampling_params.logprobs
        made_up = logprobs(tokens[0], max(0, wanted)) if tokens and wanted is not None else None
        struct = OutputStruct(self.request_id, tokens, made_up, finish_reason=reason, stop_reason=stop_reason)
        return Output(self.request_id, len(tokens), reason is not None, struct)


def layers_of(work: list[tuple[Sequence, int]], memory: MockMemory) -> Callable[[int], None]:
    """A function that writes one layer of the KV of a step, which computes so many tokens of each sequence."""
    hashes, slots = [], []
    for sequence, count in work:
        begin, end = sequence.computed, sequence.computed + count
        hashes.append(memory.prefix_hashes(sequence.chain, sequence.tokens[begin:end], begin))
        slots.append(memory.slots(sequence.blocks, begin, end))
        sequence.chain = int(hashes[-1][-1])
    step_hashes, step_slots = np.concatenate(hashes), np.concatenate(slots)
    return lambda layer: memory.write(layer, step_slots, step_hashes)
