"""A small decoder with random weights over a paged KV cache. The check overlaps writes with its prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from transfer.check.shape import Shape

MLP_RATIO = 4


@dataclass(frozen=True, slots=True)
class _Weights:
    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Transformer:
    """Pre-norm blocks of grouped-query attention and an MLP, without positions: only time and memory matter here."""

    def __init__(self, shape: Shape, device: Any, seed: int = 0) -> None:
        self._shape, self._device = shape, device
        generator = torch.Generator(device).manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.randn(rows, columns, generator=generator, device=device) * rows**-0.5
            return made.to(getattr(torch, shape.dtype))

        hidden, attention = shape.hidden, shape.heads * shape.head_dim
        self._layers = [
            _Weights(
                weight(hidden, attention + 2 * shape.kv_heads * shape.head_dim),
                weight(attention, hidden),
                weight(hidden, MLP_RATIO * hidden),
                weight(MLP_RATIO * hidden, hidden),
            )
            for _ in range(shape.layers)
        ]

    def prompt(self, tokens: int, seed: int) -> torch.Tensor:
        """A prompt as random embeddings, `[tokens, hidden]`."""
        generator = torch.Generator(self._device).manual_seed(seed)
        made = torch.randn(tokens, self._shape.hidden, generator=generator, device=self._device)
        return made.to(getattr(torch, self._shape.dtype))

    def forward(
        self,
        chunk: torch.Tensor,
        begin: int,
        blocks: Sequence[int],
        cache: Sequence[torch.Tensor],
        saved: Callable[[int], None],
    ) -> torch.Tensor:
        """Compute the chunk `[tokens, hidden]` at the prompt's positions from `begin` on.

        Its KV goes into `blocks` of `cache`. `saved(layer)` is called where vLLM calls a connector: when the layer's
        attention has been launched.
        """
        shape, end = self._shape, begin + len(chunk)
        table = torch.tensor(blocks, device=self._device)[: -(-end // shape.block_size)]
        positions = torch.arange(begin, end, device=self._device)
        mask = positions[:, None] >= torch.arange(end, device=self._device)
        for layer, (weights, layer_cache) in enumerate(zip(self._layers, cache, strict=True)):
            chunk = chunk + self._attention(weights, chunk, positions, table, mask, layer_cache)
            saved(layer)
            chunk = chunk + functional.gelu(_normed(chunk) @ weights.up) @ weights.down
        return chunk

    def _attention(
        self,
        weights: _Weights,
        chunk: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        mask: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        shape, tokens, end = self._shape, len(chunk), mask.shape[1]
        sizes = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]
        queries, *new = (_normed(chunk) @ weights.qkv).split(sizes, dim=-1)
        new_kv = torch.cat([part.view(tokens, shape.kv_heads, shape.head_dim) for part in new], dim=-1)
        cache[table[positions // shape.block_size], :, positions % shape.block_size] = new_kv
        all_kv = cache[table].transpose(0, 1).flatten(1, 2)[None, :, :end]
        keys, values = all_kv.repeat_interleave(shape.heads // shape.kv_heads, dim=1).split(shape.head_dim, dim=-1)
        queries = queries.view(1, tokens, shape.heads, shape.head_dim).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return attended[0].transpose(0, 1).flatten(1) @ weights.out


def _normed(hidden: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(hidden, hidden.shape[-1:])
