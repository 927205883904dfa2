"""When decode gives way to prefill: how far decode is below its peak, against what the switch costs. Pure.

Spatial against temporal intensity (TD-Pipe, arXiv 2506.10470). As answers end, batches shrink, and a step reads the
weights for fewer tokens: the *spatial* intensity falls. A prefill phase brings new answers, but the pipeline's later
stages wait while its first, longer step comes through: the *temporal* intensity is the share of the phase that is no
such bubble. Decode gives way where its spatial intensity is below the temporal intensity of the phase.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deployments.step_cost import Coefficients


@dataclass(frozen=True, slots=True)
class PrefillPhase:
    """What a prefill phase would be. Times are of steps through all stages.

    `requests`, `tokens`: whose prompts it computes, and how long these are together. `is_all`: it has all that waits.
    `seconds`: of its steps together. `longest_s`: of its longest step.
    """

    requests: int
    tokens: int
    is_all: bool
    seconds: float
    longest_s: float


def prefill_phase(steps: Coefficients, prompts: Sequence[int], step_tokens: int, is_all: bool) -> PrefillPhase:
    """The phase that computes `prompts`, which are lengths in tokens. `step_tokens`: the most tokens of a step."""
    tokens = sum(prompts)
    seconds = steps.base_s * math.ceil(tokens / step_tokens) + sum(steps.beside_s(each, 0) for each in prompts)
    longest_s = steps.step_s(min(tokens, step_tokens), 0, 0, 0)
    return PrefillPhase(len(prompts), tokens, is_all, seconds, longest_s)


def spatial(steps: Coefficients, batch: float, peak_batch: float, context: float) -> float:
    """The decode rate at a batch size, over that at the largest batch size that memory and seats allow: 0 to 1.

    `context`: the tokens that a sequence holds, in the mean. 1 where nothing is known of the steps.
    """

    if batch <= 0 or not any(steps):
        return 1.0

    def rate(size: float) -> float:
        return size / steps.step_s(0, 0, size, size * context)

    return rate(batch) / rate(max(batch, peak_batch))


class DecodeRate:
    """How far the decode rate of a phase has fallen since its beginning, as measured: what no model gets wrong.

    `steps`: a rate is that of so many steps together, since single ones vary by more than what is looked for.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: list[tuple[int, float]] = []
        self._last: deque[tuple[int, float]] = deque(maxlen=steps)

    def begin(self) -> None:
        """A decode phase begins."""
        self._first.clear()
        self._last.clear()

    def observe(self, sequences: int, seconds: float) -> None:
        """A decode step of so many sequences."""
        if len(self._first) < self._steps:
            self._first.append((sequences, seconds))
        self._last.append((sequences, seconds))

    @property
    def left(self) -> float:
        """The rate of the last steps over that of the first ones, at most 1; 1 before there are enough of both."""
        if len(self._last) < self._steps:
            return 1.0
        first, last = _rate(self._first), _rate(self._last)
        return min(last / first, 1.0) if first > 0.0 else 1.0


def _rate(steps: Collection[tuple[int, float]]) -> float:
    """Sequences a second."""
    seconds = sum(seconds for _, seconds in steps)
    return sum(sequences for sequences, _ in steps) / seconds if seconds > 0.0 else 0.0


def temporal(phase: PrefillPhase, decode_s: float, stages: int) -> float:
    """One minus the share of the phase in which stages wait for its first step to come through: 0 to 1.

    `decode_s`: of a decode step through all stages. Behind decode steps the stages are busy until the first prefill
    step is due, so only what it is longer than those is a bubble.
    """
    if phase.requests == 0:
        return 0.0
    if phase.seconds <= 0.0:  # nothing is known of the steps
        return 1.0
    drain_s = phase.longest_s * (stages - 1)
    bubble_s = max(phase.longest_s - decode_s, 0.0) * (stages - 1)
    return 1.0 - bubble_s / (phase.seconds + drain_s)


@dataclass(frozen=True, slots=True)
class SwitchRule:
    """Guards of the comparison.

    `least_steps`: a prefill phase of fewer full steps does not begin while more waits that does not fit yet. Without it
    each answer that ends would begin a phase of its own. `least_share`: of the KV memory, where that is less: a small
    engine would otherwise have to be nearly empty. `margin`: the spatial intensity must be below the temporal one by
    this. `least_rounds`: rounds that a decode phase has at least; in a round each stage has a batch.
    """

    least_steps: float = 2.0
    least_share: float = 0.125
    margin: float = 0.02
    least_rounds: int = 8

    def least_tokens(self, step_tokens: int, memory_tokens: int) -> float:
        """The least prompt tokens of a phase that leaves something waiting."""
        return min(self.least_steps * step_tokens, self.least_share * memory_tokens)

    def goes_back(
        self, spatial_intensity: float, phase: PrefillPhase, decode_s: float, stages: int, least_tokens: float
    ) -> tuple[bool, str]:
        """Whether decode gives way to this phase, and why or why not. `decode_s`: of a step through all stages."""
        if phase.requests == 0:
            return False, "nothing that waits fits"
        if phase.tokens < least_tokens and not phase.is_all:
            return False, "the prefill phase would be too small"
        temporal_intensity = temporal(phase, decode_s, stages)
        if spatial_intensity + self.margin < temporal_intensity:
            return True, f"spatial intensity {spatial_intensity:.2f} under temporal {temporal_intensity:.2f}"
        return False, f"spatial intensity {spatial_intensity:.2f} not under temporal {temporal_intensity:.2f}"
