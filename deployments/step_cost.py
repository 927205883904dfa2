"""What one step of an engine costs, as five coefficients.

    step_s = base_s + prefill_token_s * prefill_tokens + prefill_context_s * prefill_context
                    + sequence_s * decode_sequences    + context_s * decode_context

The terms are those of `messages.StepSample`. The sum is linear, so numpy computes it for many replicas in one product
(`np.array(coefficients)` gives the five numbers in this order), and learning it takes only 25 numbers of memory.
"""

from __future__ import annotations

from typing import NamedTuple


class Coefficients(NamedTuple):
    """Seconds of a step, and what each thing in it adds; none is negative."""

    base_s: float
    prefill_token_s: float
    prefill_context_s: float
    sequence_s: float
    context_s: float

    def step_s(
        self, prefill_tokens: float, prefill_context: float, decode_sequences: float, decode_context: float
    ) -> float:
        """Seconds of one step; the arguments are as in `StepSample`."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.prefill_context_s * prefill_context
            + self.sequence_s * decode_sequences
            + self.context_s * decode_context
        )

    def prefill_s(self, tokens: int, cached_tokens: int, chunk_tokens: int) -> float:
        """Seconds of all the steps of one prompt, alone on the engine, in chunks of `chunk_tokens` (at least 1).

        `cached_tokens` of its `tokens` are in the cache; the last one is computed in any case.
        """
        steps = -(-(tokens - min(cached_tokens, tokens - 1)) // chunk_tokens)
        return self.base_s * steps + self.beside_s(tokens, cached_tokens)

    def beside_s(self, tokens: int, cached_tokens: int) -> float:
        """The same without what every step takes: what the prompt adds to steps that run in any case."""
        cached = min(cached_tokens, tokens - 1)
        new = tokens - cached
        return self.prefill_token_s * new + self.prefill_context_s * (tokens - 1 + cached) * new * 0.5
