"""Many decode steps of one unchanging batch: how long they take, and how many are done at a given time.

Step k of a batch of S sequences that hold C tokens takes `base + per_token * (C + k * S)` seconds. So the time of n
steps is a quadratic in n, and n follows from a time by its root.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """`base_s`: seconds of a step without its context. `context_s`: seconds per token of context.

    `sequences`: each adds one token of context per step. `context`: tokens at the first step.
    """

    base_s: float
    context_s: float
    sequences: int
    context: int

    def seconds(self, steps: int) -> float:
        """Seconds that the first `steps` steps take together."""
        tokens = steps * self.context + self.sequences * (steps * (steps - 1) // 2)
        return steps * self.base_s + self.context_s * tokens

    def step_s(self, step: int) -> float:
        """Seconds that step number `step` takes, counted from 0."""
        return self.base_s + self.context_s * (self.context + step * self.sequences)

    def steps_ended(self, elapsed_s: float) -> int:
        """The number of steps that are complete after `elapsed_s` seconds."""
        steps = self._root(elapsed_s)
        while steps > 0 and self.seconds(steps) > elapsed_s:
            steps -= 1
        while self.seconds(steps + 1) <= elapsed_s:
            steps += 1
        return steps

    def _root(self, elapsed_s: float) -> int:
        """The number of steps by the quadratic formula, exact up to rounding."""
        square = self.context_s * self.sequences / 2
        linear = self.base_s + self.context_s * self.context - square
        if square <= 0.0:
            return int(max(elapsed_s, 0.0) / linear)
        return int((math.sqrt(linear * linear + 4 * square * max(elapsed_s, 0.0)) - linear) / (2 * square))
