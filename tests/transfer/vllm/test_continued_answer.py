"""Model runner V1 takes what was answered elsewhere for output; its generators stand where the answer ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops  # noqa: F401 - the sampler's kernel comes with it
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from transfer.vllm.continued_answer import RequestGenerator, answered, continue_from_answered, count_answered

SEED, VOCABULARY = 11, 64


def state(sent: list[int], seed: int | None = None) -> CachedRequestState:
    """A new request as runner V1 makes it."""
    params = SamplingParams(max_tokens=9, seed=seed, extra_args={"baton_answered": sent, "other": 1})
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    return CachedRequestState("r", [1, 2, 3], [], params, generator, ([0],), 0, [])


def draws(generator: torch.Generator, count: int) -> list[int]:
    return [int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)) for _ in range(count)]


def test_what_was_answered_is_output_and_no_prompt() -> None:
    request = state([7, 8])
    for _ in range(2):  # it may leave the batch and come again
        continue_from_answered(request)
        assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2, 3], [7, 8])
        assert (request.num_prompt_tokens, request.num_tokens) == (3, 5)
    request.output_token_ids.append(9)
    continue_from_answered(request)
    assert request.output_token_ids == [7, 8, 9]
    assert answered(request.sampling_params) == [7, 8]
    assert answered(SamplingParams()) == answered(None) == []


def test_a_generator_goes_on_behind_the_draws_of_the_answer() -> None:
    whole = draws(torch.Generator().manual_seed(SEED), 2000)
    for sent in (0, 1, 5, 1990):
        request = state([7] * sent, SEED)
        continue_from_answered(request)
        assert draws(request.generator, 6) == whole[sent : sent + 6]


def test_a_draw_for_a_part_of_a_prompt_is_taken_back() -> None:
    """As runner V1 does it, `_bookkeeping_sync`."""
    whole = draws(torch.Generator().manual_seed(SEED), 10)
    request = state([7] * 3, SEED)
    continue_from_answered(request)
    generator = request.generator
    assert draws(generator, 1) == whole[3:4]
    generator.set_offset(generator.get_offset() - 4)
    request.output_token_ids.append(9)
    assert draws(generator, 1) == whole[3:4]
    request.output_token_ids = [*request.output_token_ids]  # as after a preemption
    continue_from_answered(request)
    assert request.generator is generator
    assert draws(generator, 1) == whole[4:5]
    request.output_token_ids.append(9)
    generator.set_offset(generator.get_offset() - 4)
    assert draws(generator, 1) == whole[5:6]


def test_vllms_sampler_on_cpu_draws_once_for_each_token() -> None:
    sampler = TopKTopPSampler()
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))

    def sampled(generator: torch.Generator, count: int) -> list[int]:
        return [int(sampler.forward_cpu(logits.clone(), {0: generator}, None, None)[0]) for _ in range(count)]

    whole = sampled(torch.Generator().manual_seed(SEED), 12)
    assert len(set(whole)) > 3
    assert sampled(RequestGenerator.of(SEED, [0] * 5), 7) == whole[5:]


def config(v2: bool = False, fp64: bool = False) -> Any:
    return SimpleNamespace(use_v2_model_runner=v2, model_config=SimpleNamespace(use_fp64_gumbel=fp64))


@pytest.fixture
def plain() -> Iterator[Any]:
    """vLLM's own method; put back afterwards."""
    add = InputBatch.add_request
    yield add
    InputBatch.add_request = add


def test_runner_v2_is_left_alone_and_unknown_draws_are_refused(plain: Any) -> None:
    count_answered(config(v2=True, fp64=True))
    with pytest.raises(ValueError, match="use_fp64_gumbel"):
        count_answered(config(fp64=True))
    assert InputBatch.add_request is plain


def test_the_batch_is_told_before_it_copies_a_request(plain: Any) -> None:
    count_answered(config())
    wrapped: Any = InputBatch.add_request
    assert wrapped is not plain
    count_answered(config())
    assert InputBatch.add_request is wrapped, "once"
    batch = InputBatch(
        max_num_reqs=2,
        max_model_len=32,
        max_num_batched_tokens=32,
        device=torch.device("cpu"),
        vocab_size=VOCABULARY,
        block_sizes=[16],
        max_num_blocks_per_req=[2],
    )
    index = batch.add_request(state([7, 8], SEED))
    assert batch.token_ids_cpu[index, :5].tolist() == [1, 2, 3, 7, 8]
    assert batch.num_prompt_tokens[index] == 3
    assert batch.num_tokens_no_spec[index] == 5
    assert batch.req_output_token_ids[index] == [7, 8]
    assert isinstance(batch.generators[index], RequestGenerator)
