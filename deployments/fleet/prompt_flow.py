"""How many prompts were placed on a replica lately, and how long they take. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_S = 10.0
"""A prompt that was placed so long ago counts for about a third of a new one."""


@dataclass(slots=True)
class PromptFlow:
    """Sums over the prompts placed, in which older ones fade. Times are seconds of the caller's clock.

    `prompts`, `seconds`: the number of prompts and their predicted seconds, as they had faded at `at_s`.
    """

    prompts: float = 0.0
    seconds: float = 0.0
    at_s: float = 0.0

    def placed(self, prefill_s: float, now_s: float) -> None:
        """A prompt was placed that takes so many seconds."""
        left = math.exp(-max(0.0, now_s - self.at_s) / WINDOW_S)
        self.prompts, self.seconds = left * self.prompts + 1.0, left * self.seconds + prefill_s
        self.at_s = max(now_s, self.at_s)
