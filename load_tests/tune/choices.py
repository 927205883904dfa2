"""Chooses an engine's settings from its measured steps: the chunk of a prompt and the sequences of a replica.

Pure: figures in, choices out. `load_tests/tune/tune.py` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompts computed in chunks of `tokens`. `longest_s`: the longest step; an abort or a new request waits for it."""

    tokens: int
    tokens_per_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """`sequences` sequences decode at once. `step_s`: seconds of a step, the time that each waits for a token."""

    sequences: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.sequences / self.step_s


@dataclass(frozen=True, slots=True)
class Goals:
    """`tpot_s`: the longest time for a decode step. `gap_s`: the longest for one that also computes part of a prompt.
    `loss`: the share of prefill's best throughput that may be given up for shorter steps."""

    tpot_s: float
    gap_s: float
    loss: float = 0.05


def chunk_of(tokens: int, steps_s: Sequence[float]) -> Chunk:
    """The figures of a chunk, from the steps in which one prompt was computed."""
    return Chunk(tokens, tokens * len(steps_s) / sum(steps_s), max(steps_s))


def prefill_chunk(chunks: Sequence[Chunk], loss: float) -> Chunk:
    """The smallest chunk that gives up no more than `loss` of the best throughput."""
    least = (1 - loss) * max(chunk.tokens_per_s for chunk in chunks)
    return min((chunk for chunk in chunks if chunk.tokens_per_s >= least), key=lambda chunk: chunk.tokens)


def most_sequences(loads: Sequence[Load], tpot_s: float) -> Load:
    """The most sequences whose step takes at most `tpot_s`. Where all take longer, the fewest sequences."""
    fitting = [load for load in loads if load.step_s <= tpot_s]
    return max(fitting, key=lambda load: load.sequences) if fitting else min(loads, key=lambda load: load.sequences)


def decode_chunk(beside_s: Mapping[int, float], gap_s: float) -> int:
    """The most prompt tokens whose step takes at most `gap_s`. Where all take longer, the fewest tokens."""
    return max((tokens for tokens, seconds in beside_s.items() if seconds <= gap_s), default=min(beside_s))
