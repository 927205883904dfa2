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
"""The longest step that is learned from; a longer one was no work."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """What hardware can do, and what a model asks of it, for one engine.

    `flops_per_s`, `bytes_per_s`: as achieved, not as advertised. `overhead_s`: of every step. `weight_bytes`: read once
    per step. `flops_per_token`: of all layers, for one token. `attention_flops_per_token_pair`: for the attention of
    one token to one other. `kv_bytes_per_token`: keys and values of one token. `head_flops`: of the logits, which are
    computed only where a token is sampled.
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
        """The time of computing plus the time of reading. A real step overlaps them, so this is at most twice too much.

        It is close where one of the two dominates: computing in long prefills, reading in decode.
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
    """One accelerator or CPU core. `*_efficiency`: the share of its peak that inference reaches."""

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
"""Peaks by device. They are the start; what is learned replaces them.

H100 SXM, H200: dense bfloat16 and memory bandwidth by NVIDIA's data sheets of the two. Half of the compute: between
the 38-43% that Llama 3 was trained with on H100s (arXiv 2407.21783, table 4) and the 76% of PaLM's prefill on TPUs
(Pope et al., arXiv 2211.05102). 70% of the bandwidth and 3 ms a step for scheduling and launches are assumptions.

`cpu`: one core, float32: two 8-wide multiply-adds a cycle at 3 GHz. Efficiency and bandwidth are set to what the 135M
model (SmolLM2, float32) reached on a busy core of an AMD EPYC: 135 to 220 prompt tokens a second, decode steps of 20 to
60 ms. On a quiet core it prefills several times as fast, which the step model learns.
"""

UNKNOWN_DEVICE = Device(65e12, 320e9, 0.3, 0.5, 0.005)
"""For an accelerator that is not in the table: NVIDIA's T4 by its data sheet, the slowest that is still common."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a Hugging Face config, for a model with dense, gated feed-forward layers.

    `kv_bytes_per_value`: apart from the weights, because the KV cache of a quantised model is usually not quantised.
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
    """The device of the table whose name is part of `name` ("NVIDIA H100 80GB HBM3"), else `UNKNOWN_DEVICE`."""
    return next((device for known, device in DEVICES.items() if known in name.lower()), UNKNOWN_DEVICE)


def roofline(shape: ModelShape, device_name: str, workers: int = 1) -> Roofline:
    """A model on `workers` equal devices (tensor parallel, or CPU cores), which divide the work evenly."""
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


BASE, TOKEN, SEQUENCE = map(Coefficients._fields.index, ("base_s", "prefill_token_s", "sequence_s"))

FLOORS = np.array((1e-5, 1e-8, 1e-13, 1e-7, 1e-11))
"""Seconds. A prior of zero is replaced by this, because a factor on zero could not learn anything."""


class StepModel:
    """Learns the coefficients of a pool from its steps: recursive least squares, made safe in six ways.

    It learns factors on the prior, from relative errors, so that short steps count as much as long ones.

    - A step whose error is far beyond the usual one (the median of the last 128) counts for less, by Huber's weight.
    - Certainty has an upper bound, so that it forgets: after `memory` steps the older ones hardly count.
    - Certainty has a lower bound, that of the prior: equal steps say nothing about the directions that they do not
    span,
      and the factors in those directions neither drift nor grow without bound.
    - No factor is negative, and while there are few steps, none is far from 1: it is the best fit within these bounds.
    - A step of as many sequences as there are `seats` (0: not known) takes at least what so many prompt tokens take,
      which pass the same layers. Where reading the weights is what takes a small step's time, a few sequences seem to
      add nothing. Without this bound, any number of them would seem to. It counts once steps with prompts were seen:
      what the prior says of prompts bounds nothing.
    - When most of the last steps err in the same direction, the machine has changed: the factors are scaled by that
      error, and are then only as certain as the prior was.

    Steps are learned in batches, so one step costs about ten microseconds on average.
    """

    PRIOR_INFORMATION = 0.01  # of a factor: it may be 100% off, while equal steps vary by 10%
    USUAL_ERROR = 0.3  # before there is a median
    HUBER = 1.5
    CHANGED_AT = 0.25
    PROMPTS_SEEN = 1.0  # about what one step of nothing but prompts tells
    RECENT = 128
    BATCH = 32

    def __init__(self, prior: Coefficients, *, memory: int = 256, seats: int = 0) -> None:
        self._seats = seats
        self._scale = np.maximum(np.array(prior, dtype=float), FLOORS)
        self._factors: NDArray[np.float64] = np.array(prior, dtype=float) / self._scale
        self._start = self._factors.copy()
        self._information = np.eye(5) * self.PRIOR_INFORMATION
        self._memory = memory
        self._errors: deque[float] = deque(maxlen=self.RECENT)
        self._pending: list[tuple[float, ...]] = []
        self._count = 0
        self._prompts_seen = 0.0
        self._coefficients = prior

    @property
    def coefficients(self) -> Coefficients:
        """The best estimate now; the prior while no step was seen."""
        return self._coefficients

    @property
    def count(self) -> int:
        """The number of steps learned from."""
        return self._count

    def observe(self, sample: StepSample) -> None:
        """Learn from one step. A step without a sound time, or with nothing in it, is ignored.

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
        """One update. `parts`: `[steps, 5]`, the seconds that the prior gives to each term of each step."""
        expected = self._expected(parts)
        if self._notice_change(seconds / expected - 1.0):
            expected = self._expected(parts)
        relative, terms = seconds / expected, parts / expected[:, None]
        weights = np.minimum(1.0, self.HUBER * self._usual_error() / np.maximum(np.abs(relative - 1.0), 1e-12))
        weighted = (terms * weights[:, None]).T
        before = self._faded(len(seconds))
        self._information = before + weighted @ terms
        self._count += len(seconds)
        self._prompts_seen += float(weighted[TOKEN] @ terms[:, TOKEN])
        reach = 1.0 + 0.25 * self._count
        low, high = self._start / reach, np.maximum(self._start, 1.0) * reach
        vector = before @ self._factors + weighted @ relative
        if self._seats and self._prompts_seen >= self.PROMPTS_SEEN:
            token_s, base_s = (self._factors * self._scale)[[TOKEN, BASE]]
            least = (token_s - base_s / self._seats) / self._scale[SEQUENCE]
            low[SEQUENCE] = np.clip(least, low[SEQUENCE], high[SEQUENCE])
        self._factors = _best_within(self._information, vector, low, high)
        self._coefficients = Coefficients(*(self._factors * self._scale).tolist())

    def _expected(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """The expected seconds of each step; never 0, because errors are divided by them."""
        return np.asarray(np.maximum(parts @ self._factors, 0.01 * (parts @ self._start) + 1e-9))

    def _faded(self, steps: int) -> NDArray[np.float64]:
        """The information, in which older steps count for less, but no direction becomes less certain than at first."""
        information = self._information * math.exp(-steps / self._memory)
        excess = np.sqrt(np.maximum(1.0, np.linalg.inv(information).diagonal() * self._least_information()))
        return np.asarray(information * np.outer(excess, excess))

    def _least_information(self) -> NDArray[np.float64]:
        """The least information: each factor may always be off by its own size."""
        return np.asarray(self.PRIOR_INFORMATION / np.maximum(self._factors, 0.05) ** 2)

    def _notice_change(self, errors: NDArray[np.float64]) -> bool:
        """Whether the machine has changed. All factors are then first scaled by the same amount."""
        self._errors.extend(errors.tolist())
        error = _median(list(self._errors))
        if len(self._errors) < self.RECENT // 4 or abs(error) < self.CHANGED_AT:
            return False
        self._factors = self._factors * (1.0 + error)
        self._information = np.diag(self._least_information())
        self._errors.clear()
        return True

    def _usual_error(self) -> float:
        """A robust standard deviation of the relative errors; a constant while there are few."""
        if len(self._errors) < 8:
            return self.USUAL_ERROR
        return max(1.4826 * _median([abs(error) for error in self._errors]), 0.02)


def _best_within(
    matrix: NDArray[np.float64], vector: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve the normal equations of a least-squares fit within bounds:

    the factor furthest outside is set to its bound.
    """
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
    is_timed = 0.0 < sample.seconds <= LONGEST_STEP_S  # also false for NaN
    return is_timed and min(counts) >= 0 and (sample.prefill_tokens > 0 or sample.decode_sequences > 0)
