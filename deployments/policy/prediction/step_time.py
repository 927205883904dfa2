"""How long an engine's steps take: `Coefficients`, at first from the hardware's data sheet, then learned online."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deployments.messages import StepSample
from deployments.step_cost import Coefficients

LONGEST_STEP_S = 600.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """What hardware can do, and what a model asks of it, for one engine.

    `flops_per_s`, `bytes_per_s`: as achieved, not as advertised. `overhead_s`: of a step, whatever is in it.
    `weight_bytes`: read once a step. `flops_per_token`: of the layers, for one token. `attention_flops_per_token_pair`:
    for one token's attention to one other. `kv_bytes_per_token`: of its keys and values. `head_flops`: of the logits,
    which only tokens that are sampled from need.
    """

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float
    weight_bytes: float
    flops_per_token: float
    attention_flops_per_token_pair: float
    kv_bytes_per_token: float
    head_flops: float = 0.0

    def coefficients(self) -> Coefficients:
        """The sum of computing and reading. A real step overlaps the two, so this is at most twice too much.

        It is near the truth where one of the two rules: long prefills compute, decoding reads.
        """
        return Coefficients(
            base_s=self.overhead_s + self.weight_bytes / self.bytes_per_s,
            prefill_token_s=self.flops_per_token / self.flops_per_s,
            prefill_context_s=self.attention_flops_per_token_pair / self.flops_per_s,
            sequence_s=(self.flops_per_token + self.head_flops) / self.flops_per_s,
            context_s=self.kv_bytes_per_token / self.bytes_per_s,
        )


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or CPU core. `*_efficiency`: the share of its peak that inference gets."""

    flops_per_s: float
    bytes_per_s: float
    flops_efficiency: float
    bytes_efficiency: float
    overhead_s: float


DEVICES = {
    "h200": Device(989e12, 4.8e12, 0.5, 0.7, 0.003),
    "h100": Device(989e12, 3.35e12, 0.5, 0.7, 0.003),
    "cpu": Device(96e9, 20e9, 0.5, 0.7, 0.004),
}
"""Peaks by device, to begin with; what is learned takes their place.

H100 SXM, H200: dense bfloat16 and memory bandwidth by NVIDIA's data sheets of the two. Half of the compute: between
the 38-43% that Llama 3 was trained with on H100s (arXiv 2407.21783, table 4) and the 76% of PaLM's prefill on TPUs
(Pope et al., arXiv 2211.05102). 70% of the bandwidth and 3 ms a step for scheduling and launches are assumptions.

`cpu`: one core, float32: two 8-wide multiply-adds a cycle at 3 GHz. Efficiency and bandwidth are set to what the 135M
model (SmolLM2, float32) did on a core of an AMD EPYC that was not quiet: 135 to 220 prompt tokens a second, decode
steps of 20 to 60 ms. On a quiet one it prefills several times as fast, which the model learns.
"""

UNKNOWN_DEVICE = Device(65e12, 320e9, 0.3, 0.5, 0.005)
"""For an accelerator that is not in the table: NVIDIA's T4 by its data sheet, the slowest one still common."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Hugging Face config's numbers, of a model with gated feed-forward layers that are all dense.

    `kv_bytes_per_value`: a quantised model's KV cache is usually not quantised.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    bytes_per_weight: float = 2.0
    kv_bytes_per_value: float = 2.0


def device_named(name: str) -> Device:
    """The device of the table whose name is part of `name` ("NVIDIA H100 80GB HBM3"), or else a slow one."""
    return next((device for known, device in DEVICES.items() if known in name.lower()), UNKNOWN_DEVICE)


def roofline(shape: ModelShape, device_name: str, workers: int = 1) -> Roofline:
    """A model on `workers` devices of a kind (tensor parallel; CPU cores), which divide the work evenly."""
    device = device_named(device_name)
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer_weights = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    head_weights = shape.vocab * shape.hidden
    return Roofline(
        flops_per_s=device.flops_per_s * device.flops_efficiency * workers,
        bytes_per_s=device.bytes_per_s * device.bytes_efficiency * workers,
        overhead_s=device.overhead_s,
        weight_bytes=(layer_weights + head_weights) * shape.bytes_per_weight,
        flops_per_token=2.0 * layer_weights,
        attention_flops_per_token_pair=4.0 * shape.layers * shape.heads * shape.head_dim,
        kv_bytes_per_token=2.0 * shape.layers * shape.kv_heads * shape.head_dim * shape.kv_bytes_per_value,
        head_flops=2.0 * head_weights,
    )


FLOORS = np.array((1e-5, 1e-8, 1e-13, 1e-7, 1e-11))
"""Seconds: so small that a prior of zero may be no more than this, and yet be multiplied."""


class StepModel:
    """Learns the coefficients of a pool from its steps. Recursive least squares, made safe in five ways.

    What is learned are factors on the prior, from relative errors, so that short steps count as much as long ones.

    - A step whose error is far beyond the usual one (the median of the last 128) counts for less, by Huber's weight.
    - Certainty has an upper bound, which is forgetting: after `memory` steps the older ones hardly count.
    - It has a lower bound, the prior's own: steps that are all alike say nothing new of the directions they do not
      span, and those neither drift nor blow up.
    - No factor is negative, and while there are few steps none is far from 1: it is the best fit within these bounds.
    - When most of the last steps err the same way, the machine has changed: what was learned is scaled by how much,
      and no more certain than the prior was.

    Steps are taken in by the batch, so that one costs some ten microseconds on average.
    """

    PRIOR_INFORMATION = 0.01  # of a factor, by the noise's: it may be 100% off, and alike steps vary by 10%
    USUAL_ERROR = 0.3  # before there is a median
    HUBER = 1.5
    CHANGED_AT = 0.25
    RECENT = 128
    BATCH = 32

    def __init__(self, prior: Coefficients, *, memory: int = 256) -> None:
        self._scale = np.maximum(np.array(prior, dtype=float), FLOORS)
        self._factors: NDArray[np.float64] = np.array(prior, dtype=float) / self._scale
        self._start = self._factors.copy()
        self._information = np.eye(5) * self.PRIOR_INFORMATION
        self._memory = memory
        self._errors: deque[float] = deque(maxlen=self.RECENT)
        self._pending: list[tuple[float, ...]] = []
        self._count = 0
        self._coefficients = prior

    @property
    def coefficients(self) -> Coefficients:
        """The best guess now; the prior while nothing was seen."""
        return self._coefficients

    @property
    def count(self) -> int:
        """Steps learned from."""
        return self._count

    def observe(self, sample: StepSample) -> None:
        """Learn from one step. One of no time or an absurd one, or with nothing in it, is ignored.

        Early steps count at once, later ones with the next full batch.
        """
        if not _is_sound(sample):
            return
        counts = sample.prefill_tokens, sample.prefill_context, sample.decode_sequences, sample.decode_context
        self._pending.append((sample.seconds, 1.0, *counts))
        if len(self._pending) >= min(self.BATCH, 1 + self._count // 4):
            rows, self._pending = np.array(self._pending), []
            self._learn(rows[:, 0], rows[:, 1:] * self._scale)

    def _learn(self, seconds: NDArray[np.float64], parts: NDArray[np.float64]) -> None:
        """One update: what steps took, and `[steps, 5]` what of it the prior would give to each term, in seconds."""
        expected = self._expected(parts)
        if self._notice_change(seconds / expected - 1.0):
            expected = self._expected(parts)
        relative, terms = seconds / expected, parts / expected[:, None]
        weights = np.minimum(1.0, self.HUBER * self._usual_error() / np.maximum(np.abs(relative - 1.0), 1e-12))
        weighted = (terms * weights[:, None]).T
        before = self._faded(len(seconds))
        self._information = before + weighted @ terms
        self._count += len(seconds)
        reach = 1.0 + 0.25 * self._count
        self._factors = _best_within(
            self._information,
            before @ self._factors + weighted @ relative,
            self._start / reach,
            np.maximum(self._start, 1.0) * reach,
        )
        self._coefficients = Coefficients(*(self._factors * self._scale).tolist())

    def _expected(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds by what is known, never nothing: errors are divided by it."""
        return np.asarray(np.maximum(parts @ self._factors, 0.01 * (parts @ self._start) + 1e-9))

    def _faded(self, steps: int) -> NDArray[np.float64]:
        """Older steps count for less, but no direction becomes less certain than it was at first."""
        information = self._information * math.exp(-steps / self._memory)
        excess = np.sqrt(np.maximum(1.0, np.linalg.inv(information).diagonal() * self._least_information()))
        return np.asarray(information * np.outer(excess, excess))

    def _least_information(self) -> NDArray[np.float64]:
        """Each factor may always be as far off as itself."""
        return np.asarray(self.PRIOR_INFORMATION / np.maximum(self._factors, 0.05) ** 2)

    def _notice_change(self, errors: NDArray[np.float64]) -> bool:
        """Whether the machine is another than it was. Then all its parts are first taken to be as much slower."""
        self._errors.extend(errors.tolist())
        error = _median(list(self._errors))
        if len(self._errors) < self.RECENT // 4 or abs(error) < self.CHANGED_AT:
            return False
        self._factors = self._factors * (1.0 + error)
        self._information = np.diag(self._least_information())
        self._errors.clear()
        return True

    def _usual_error(self) -> float:
        """A robust standard deviation of the relative errors; a guess while there are few."""
        if len(self._errors) < 8:
            return self.USUAL_ERROR
        return max(1.4826 * _median([abs(error) for error in self._errors]), 0.02)


def _best_within(
    matrix: NDArray[np.float64], vector: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve a least-squares fit's normal equations within bounds: whatever is furthest outside is held at its bound."""
    solution = np.linalg.solve(matrix, vector)
    free = np.ones(len(vector), dtype=bool)
    for _ in range(len(vector)):
        outside = np.where(free, np.maximum(low - solution, solution - high), 0.0)
        worst = int(np.argmax(outside))
        if outside[worst] <= 0.0:
            break
        free[worst] = False
        solution[worst] = min(max(solution[worst], low[worst]), high[worst])
        if free.any():
            rest = vector[free] - matrix[np.ix_(free, ~free)] @ solution[~free]
            solution[free] = np.linalg.solve(matrix[np.ix_(free, free)], rest)
    return np.clip(solution, low, high)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _is_sound(sample: StepSample) -> bool:
    counts = sample.prefill_tokens, sample.prefill_context, sample.decode_sequences, sample.decode_context
    is_timed = 0.0 < sample.seconds <= LONGEST_STEP_S  # false for a NaN too
    return is_timed and min(counts) >= 0 and (sample.prefill_tokens > 0 or sample.decode_sequences > 0)
