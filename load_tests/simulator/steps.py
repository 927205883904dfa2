"""What an engine is allowed, what it is computing, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from load_tests.simulator.span import Span
from load_tests.simulator.work import Work


@dataclass(frozen=True, slots=True)
class Limits:
    """`span_steps`: decode steps taken at once at most; 1 simulates step by step. `noise_sigma`: of lognormal noise."""

    batched_tokens: int = 8192
    sequences: int = 256
    span_steps: int = 1 << 30
    noise_sigma: float = 0.05


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `begin` to `end` of a sequence got their KV in a step that began at `start_s`."""

    work: Work
    begin: int
    end: int
    start_s: float


@dataclass(slots=True)
class Happened:
    """What one boundary between steps brought. `offered`: their blocks are ready for KV from elsewhere."""

    chunks: list[Chunk] = field(default_factory=list)
    first: list[Work] = field(default_factory=list)
    ended: list[Work] = field(default_factory=list)
    offered: list[Work] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """What is being computed: `steps` steps of decode, the first of them with `chunks`."""

    begun_s: float
    factor: float
    span: Span
    steps: int
    chunks: list[tuple[Work, int]]
    prefill_context: int = 0
