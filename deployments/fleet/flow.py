"""What was placed on a replica lately: prompts to compute, and answers whose KV cache comes from another one. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_S = 10.0
"""What was placed so long ago counts for about a third of what is new."""


def per_s(total: float, at_s: float, now_s: float) -> float:
    """The rate of a sum of a `Flow`, as it had faded at `at_s`."""
    return total * math.exp(-max(0.0, now_s - at_s) / WINDOW_S) / WINDOW_S


@dataclass(slots=True)
class Flow:
    """Sums over what was placed, in which older placements fade. Times are seconds of the caller's clock.

    `prompts`, `seconds`: the number of prompts and their predicted seconds. `moves`, `bytes`: the number of answers
    whose KV cache comes from another replica, and the bytes of their prompts. All as they had faded at `at_s`.
    """

    prompts: float = 0.0
    seconds: float = 0.0
    moves: float = 0.0
    bytes: float = 0.0
    at_s: float = 0.0

    def prompt(self, prefill_s: float, now_s: float) -> None:
        """A prompt was placed that takes so many seconds."""
        self._fade(now_s)
        self.prompts += 1.0
        self.seconds += prefill_s

    def move(self, size: float, now_s: float) -> None:
        """An answer was placed whose KV cache, of so many bytes, comes from another replica."""
        self._fade(now_s)
        self.moves += 1.0
        self.bytes += size

    def _fade(self, now_s: float) -> None:
        left = per_s(WINDOW_S, self.at_s, now_s)
        self.prompts, self.seconds = left * self.prompts, left * self.seconds
        self.moves, self.bytes = left * self.moves, left * self.bytes
        self.at_s = max(now_s, self.at_s)
