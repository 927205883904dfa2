"""What an engine may compute, what it computes now, how long that takes, and the results."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from deployments.messages import Finished, StepSample
from deployments.policy.step_size import PROMPT_SHARE, prompt_budget
from deployments.step_cost import Coefficients
from load_tests.simulator.decoding import DecodeBatch
from load_tests.simulator.span import Span
from load_tests.simulator.work import Work

FINISHED_KEPT = 256
"""The most ended parts in one snapshot. The simulator has no pool that ends more between two snapshots."""

SAMPLES_KEPT = 4
"""The most step samples in a snapshot: a span of equal steps gives one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most prompt tokens and sequences of a step.

    `span_steps`: the most decode steps taken at once; 1 simulates step by step. `noise_sigma`: of lognormal noise on
    the time of a step. `prompt_share`: as in the configuration.
    """

    batched_tokens: int = 8192
    sequences: int = 256
    span_steps: int = 1 << 30
    noise_sigma: float = 0.05
    prompt_share: float = PROMPT_SHARE


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `begin` to `end` of a sequence got their KV in a step that began at `start_s`."""

    work: Work
    begin: int
    end: int
    start_s: float


@dataclass(slots=True)
class Happened:
    """What one boundary between steps gave. `offered`: sequences whose blocks are ready for another replica's KV.

    `given_up`: sequences that move. Their KV stays until `Replica.release`.
    """

    chunks: list[Chunk] = field(default_factory=list)
    first: list[Work] = field(default_factory=list)
    ended: list[Work] = field(default_factory=list)
    offered: list[Work] = field(default_factory=list)
    given_up: list[Work] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """The current work: `steps` decode steps, or one step with `chunks`. `factor`: its times are multiplied by this."""

    begun_s: float
    factor: float
    span: Span
    steps: int
    chunks: list[tuple[Work, int]]
    prefill_context: int = 0


class Pace:
    """How long the steps of one replica take.

    `speed`: its times are multiplied by this, because replicas are not all alike.
    """

    def __init__(self, coefficients: Coefficients, limits: Limits, rng: random.Random, speed: float) -> None:
        self._coefficients, self._limits, self._rng, self._speed = coefficients, limits, rng, speed

    def prompt_budget(self, batch: DecodeBatch, coming: Iterable[Work], begun_tokens: int) -> int:
        """The most prompt tokens of the next step, beside this batch and what joins it soon: `step_size`."""
        limits, objectives = self._limits, batch.objectives | {work.tpot_s for work in coming}
        return prompt_budget(
            self._coefficients,
            limits.batched_tokens,
            len(batch),
            batch.context,
            begun_tokens,
            objectives,
            limits.prompt_share,
        )

    def step(self, now_s: float, batch: DecodeBatch, steps: int, chunks: list[tuple[Work, int]], context: int) -> Step:
        """A step that begins now. `context`: the sum, over the tokens of the chunks, of the tokens before each."""
        new = sum(tokens for _, tokens in chunks)
        base_s = self._coefficients.step_s(new, context, len(batch), 0)
        factor = self._speed
        if self._limits.noise_sigma:
            factor *= self._rng.lognormvariate(0.0, self._limits.noise_sigma)
        span = Span(base_s, self._coefficients.context_s, len(batch), batch.context)
        return Step(now_s, factor, span, steps, chunks, context)


class Log:
    """What a replica reports of the past: parts that ended, and samples of its steps."""

    def __init__(self) -> None:
        self.finished: deque[Finished] = deque(maxlen=FINISHED_KEPT)
        self.finished_count = 0
        self._samples: deque[StepSample] = deque(maxlen=SAMPLES_KEPT)

    def end(self, work: Work) -> None:
        """Note that a part has ended."""
        self.finished.append(Finished(work.session_id, work.epoch, work.outputs))
        self.finished_count += 1

    def sample(self, step: Step, batch: DecodeBatch) -> None:
        """Note that a step is over. `batch` is still as it was during the step."""
        last = step.steps - 1
        self._samples.append(
            StepSample(
                step.factor * step.span.step_s(last),
                sum(tokens for _, tokens in step.chunks),
                step.prefill_context,
                len(batch),
                batch.context + last * len(batch) if len(batch) else 0,
            )
        )

    def take_samples(self) -> tuple[StepSample, ...]:
        """The samples since the last call."""
        samples = tuple(self._samples)
        self._samples.clear()
        return samples
