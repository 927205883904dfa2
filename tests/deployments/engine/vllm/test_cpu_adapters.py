"""vLLM's LoRA operations for CPU, with and without what Baton does about tokens without an adapter."""

from __future__ import annotations

import inspect

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from deployments.engine.vllm.cpu_adapters import EXPANDS, skipping

NUMBERS = torch.tensor([-1, 0, 1, -1])
INPUTS = torch.ones(4, 8)
WEIGHTS = torch.stack([torch.full((1, 16, 8), 1.0), torch.full((1, 16, 8), 2.0)])
TUNED = torch.tensor([0.0, 8.0, 16.0, 0.0])


def added(name: str, skips: bool) -> torch.Tensor:
    """What the operation adds to each token's outputs."""
    expand = inspect.unwrap(getattr(lora_ops, name))
    output = torch.zeros(4, 16)
    more = (0, 16) if name.endswith("slice") else ()
    (skipping(expand) if skips else expand)(INPUTS, WEIGHTS, output, NUMBERS, *more)
    return output[:, 0]


@pytest.mark.parametrize("name", EXPANDS)
def test_tokens_without_an_adapter_get_nothing_and_the_others_theirs(name: str) -> None:
    assert added(name, skips=True).equal(TUNED)


@pytest.mark.parametrize("name", EXPANDS)
def test_vllm_still_gives_them_the_last_adapters(name: str) -> None:
    """When this fails, vLLM has mended it: remove `deployments/engine/vllm/cpu_adapters.py`."""
    assert added(name, skips=False).equal(torch.tensor([16.0, 8.0, 16.0, 16.0]))


def test_the_operations_are_where_they_are_replaced() -> None:
    for name in EXPANDS:
        assert getattr(punica_cpu, name) is getattr(lora_ops, name)
        assert name in inspect.getsource(punica_cpu)
    source = inspect.getsource(lora_ops.sgmv_expand) + inspect.getsource(lora_ops.sgmv_expand_slice)
    assert all(f"{name}(" in source for name in EXPANDS)
