"""LoRA on CPU: tokens without an adapter, in a step in which other tokens have one.

vLLM 0.32 gives such a token the adapter number -1, and its CPU operations take that for the last of the loaded ones. So
a request without an adapter would be answered with that adapter. Its operations for GPUs skip these tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform

EXPANDS = ("bgmv_expand", "bgmv_expand_slice")
"""The operations that add an adapter's part to the outputs of the model; all others end in one of these."""


def skip_plain_tokens(vllm_config: VllmConfig) -> None:
    """In this process, let vLLM's CPU operations add nothing to tokens without an adapter; idempotent."""
    if vllm_config.lora_config is None or not current_platform.is_cpu():
        return
    for name in EXPANDS:
        expand = getattr(lora_ops, name)
        if not hasattr(expand, "__wrapped__"):
            for module in (lora_ops, punica_cpu):
                setattr(module, name, skipping(expand))


def skipping(expand: Callable[..., None]) -> Callable[..., None]:
    """The operation, with nothing to add for tokens of a negative adapter number.

    `inputs` has a row per token, and `numbers` the adapter of each.
    """

    @functools.wraps(expand)
    def expand_some(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        numbers: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> None:
        expand(inputs * (numbers >= 0).unsqueeze(1), weights, output, numbers, *more, **named)

    return expand_some
