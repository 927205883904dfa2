"""A request whose answer began elsewhere: what was answered is output here too, and not prompt.

vLLM takes every token that comes with a request as prompt. But limits, penalties, stop conditions, grammars and a
seed's generator count generated tokens, and must count those that another engine has sampled: prefill, or a replica
that was lost. These tokens come as `extra_args["baton_answered"]`. They enter vLLM's scheduler as the tokens of a
preempted request return to it: as output that has yet to be computed. tests/deployments/engine/vllm/test_contract.py
checks what vLLM does with them then.

The scheduler tells model runner V2 which tokens are prompt, and what that runner draws depends on seed and position
alone. Runner V1, which vLLM uses on CPU, takes a new request to have no output: `count_answered` mends that.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

logger = logging.getLogger("baton.answered")

ANSWERED = "baton_answered"
OFFSET_PER_DRAW = 4
"""The offset of an accelerator's generator grows by this with each draw. Runner V1 takes a draw back by as much."""


def answered(params: SamplingParams | None) -> list[int]:
    """The tokens of a request's answer that were sampled elsewhere, as far as this engine was told."""
    extra = params.extra_args if params is not None else None
    return list((extra or {}).get(ANSWERED) or ())


class AnsweredRequests:
    """The scheduler's side. Make it while vLLM's scheduler makes its connector: it finds the scheduler on the stack."""

    def __init__(self) -> None:
        self._scheduler = scheduler_on_the_stack()
        self._unread: weakref.WeakSet[Request] = weakref.WeakSet()

    def begin(self, request: Request) -> None:
        """A new request has come."""
        if tokens := answered(request.sampling_params):
            request.append_output_token_ids(tokens)
            request.prefill_stats = None  # vLLM asserts that a first prefill, which these are of, is of prompt alone
            if request.use_structured_output:
                self._unread.add(request)

    def is_ready(self, request: Request) -> bool:
        """Asked before a request is first scheduled. By then its grammar is compiled, and reads what was answered."""
        if request in self._unread and self._read(request, answered(request.sampling_params)):
            self._unread.discard(request)
        return request not in self._unread

    def go_on(self, request: Request, token: int) -> None:
        """Prefill has sampled the next token. Decode begins by computing that token, and computes nothing twice."""
        assert request.sampling_params is not None
        request.append_output_token_ids(token)
        tokens = [*answered(request.sampling_params), token]
        request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), ANSWERED: tokens}
        self._read(request, [token])

    def _read(self, request: Request, tokens: list[int]) -> bool:
        """False when the request's grammar forbids tokens that another engine allowed. The request then fails."""
        if self._scheduler.structured_output_manager.accept_tokens(request, tokens):
            return True
        about = {"session_id": request.request_id}
        logger.error("request %s: its grammar forbids what was answered elsewhere", request.request_id, extra=about)
        self._scheduler.grammar_compile_error_reqs.add(request.request_id)
        return False


def scheduler_on_the_stack() -> Any:
    """The scheduler that is being made further up the stack. vLLM hands a connector no reference to it."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(maker := frame.f_locals.get("self"), Scheduler):
            return maker
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("vLLM no longer makes its connector in its scheduler's constructor")


def count_answered(config: VllmConfig) -> None:
    """The workers' side: make model runner V1 take what was answered as output. Takes effect once in a process.

    Raises ValueError for a way of drawing that is not known here.
    """
    if config.use_v2_model_runner:
        return
    if config.model_config.use_fp64_gumbel:
        raise ValueError("`use_fp64_gumbel` needs vLLM's model runner V2 here")
    add = InputBatch.add_request
    if hasattr(add, "__wrapped__"):
        return

    @functools.wraps(add)
    def add_request(batch: InputBatch, request: CachedRequestState) -> int:
        continue_from_answered(request)
        return int(add(batch, request))

    InputBatch.add_request = add_request


def continue_from_answered(request: CachedRequestState) -> None:
    """Before a request enters the batch, for the first time or again: its output and its generator go on."""
    tokens = answered(request.sampling_params)
    is_new = not request.output_token_ids
    if is_new:
        request.output_token_ids.extend(tokens)
    generator = request.generator
    if generator is None:
        return
    if isinstance(generator, RequestGenerator):
        generator.output = request.output_token_ids  # after a preemption it may be another list
    elif generator.device.type == "cpu":
        request.generator = RequestGenerator.of(generator.initial_seed(), request.output_token_ids)
    elif is_new and tokens:
        generator.set_offset(generator.get_offset() + OFFSET_PER_DRAW * len(tokens))


class RequestGenerator(torch.Generator):
    """A seeded request's generator on CPU, where vLLM draws one integer for each token.

    Runner V1 draws in a step that computes only a part of a prompt, too, and takes that draw back by the generator's
    offset. A CPU generator has no offset, and asking for it kills vLLM's engine. This one returns to the state after
    the draws of its request's output.
    """

    seeded_with: int
    output: list[int]

    @classmethod
    def of(cls, seed: int, output: list[int]) -> RequestGenerator:
        """`output`: the request's own list, which grows with its answer."""
        generator = cls()
        generator.seeded_with, generator.output = seed, output
        generator.set_offset(0)
        return generator

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Go to the state after the draws of the output. `offset` is not used."""
        self.manual_seed(self.seeded_with)
        torch.randint(0, 2**31, (len(self.output),), generator=self, dtype=torch.long)
