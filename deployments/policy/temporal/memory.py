"""How much KV memory an engine will hold at points of the future. Pure.

Greedy prefill (TD-Pipe, arXiv 2506.10470): prompts are computed as long as the memory of all answers, as long as these
are expected to be, stays under what there is, at each of a row of future points. A prompt that fits now but whose
answer would not, waits. So the engine neither preempts nor leaves memory empty.

TD-Pipe predicts one end of each answer (`until`). Where little is known of a request, one end says too much: all
requests of a kind would end at the same point. So a request may also count with its chance to be there (`Outlook`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

POINT_STEPS = 32
"""Decode steps from one future point to the next."""
POINTS = 32
"""The number of future points: the last is 1,024 steps away."""
AT: NDArray[np.int64] = np.arange(1, POINTS + 1, dtype=np.int64) * POINT_STEPS
"""The future points, in decode steps from now."""
CHANCE_UNIT = 1024
"""Chances are rounded to parts of this, so that sums that grow and shrink stay exact."""


class Outlook(NamedTuple):
    """How long an answer goes on. `counts`: the chance, at each future point, that the request still counts: that it
    has not ended by the point before. `most_tokens`: that it may write yet."""

    counts: NDArray[np.float64]
    most_tokens: int


def until(left_tokens: int) -> Outlook:
    """Of an answer that ends in `left_tokens` tokens (at least 1): it counts up to the first point at or after that.

    Counted to its end alone, a request that ends before the first point would weigh nothing, though it holds its
    prompt.
    """
    left = max(left_tokens, 1)
    return Outlook((left > AT - POINT_STEPS).astype(np.float64), left)


class FutureMemory:
    """The blocks that all requests together are expected to hold at each future point. A change costs microseconds.

    A request grows by a token a step while it counts. `block_tokens`: the tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._usage: NDArray[np.float64] = np.zeros(POINTS)
        self._parts: dict[Hashable, NDArray[np.float64]] = {}

    def put(self, key: Hashable, held_tokens: int, outlook: Outlook) -> None:
        """Count a request, or count it anew."""
        self.drop(key)
        part = self._parts[key] = self._part(held_tokens, outlook)
        self._usage += part

    def drop(self, key: Hashable) -> None:
        """A request is over. Idempotent."""
        part = self._parts.pop(key, None)
        if part is not None:
            self._usage -= part

    @property
    def usage(self) -> tuple[float, ...]:
        """Blocks at each future point, the next one first."""
        return tuple(self._usage.tolist())

    @property
    def peak(self) -> float:
        """The most blocks at any future point."""
        return float(self._usage.max())

    def fitting(self, requests: Iterable[tuple[int, Outlook]], blocks: float) -> int:
        """How many more requests fit, in this order: the first that does not fit ends the count.

        `requests`: the tokens that each would hold at first, and how long it goes on. `blocks`: the most at any point.
        """
        usage, count = self._usage.copy(), 0
        for held_tokens, outlook in requests:
            usage += self._part(held_tokens, outlook)
            if usage.max() > blocks:
                break
            count += 1
        return count

    def _part(self, held_tokens: int, outlook: Outlook) -> NDArray[np.float64]:
        blocks = -(-(held_tokens + np.minimum(AT, outlook.most_tokens)) // self._block_tokens)
        chances = np.round(outlook.counts * CHANCE_UNIT) / CHANCE_UNIT
        return np.asarray(blocks * chances)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._parts

    def __len__(self) -> int:
        return len(self._parts)
