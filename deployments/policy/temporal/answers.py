"""The requests that an engine has begun: how long their answers will be, and the memory that they will take. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deployments.policy.temporal.lengths import AnswerLengths, Job
from deployments.policy.temporal.memory import POINT_STEPS, FutureMemory


@dataclass(slots=True)
class _Live:
    """`counted`: the tokens that it had when it was predicted last, and `left` was what it would get yet."""

    job: Job
    written: int
    counted: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for its prompt to be computed. `written`: of its answer, where it was preempted."""

    job: Job
    written: int = 0

    @property
    def tokens(self) -> int:
        """What is to be computed of it."""
        return self.job.prompt_tokens + self.written


class LiveAnswers:
    """Requests from the first step of their prompt to their end. `block_tokens`: the tokens of a block."""

    def __init__(self, lengths: AnswerLengths, block_tokens: int) -> None:
        self._lengths = lengths
        self._memory = FutureMemory(block_tokens)
        self._live: dict[str, _Live] = {}

    def began(self, job: Job, written: int = 0) -> None:
        """The prompt of a request is in the step that was scheduled now."""
        self._live[job.key] = _Live(job, written)
        self._count(self._live[job.key])

    def wrote(self, key: str, written: int) -> None:
        """A request has so many tokens. Its prediction is corrected where it has passed a point or its prediction."""
        live = self._live.get(key)
        if live is None or written <= live.written:
            return
        live.written = written
        if written // POINT_STEPS > live.counted // POINT_STEPS or written >= live.counted + live.left:
            self._count(live)

    def gone(self, key: str) -> None:
        """A request holds no memory any more: preempted, or cut short. Idempotent."""
        self._live.pop(key, None)
        self._memory.drop(key)

    def ended(self, key: str, written: int, by_limit: bool) -> None:
        """An answer is complete. Idempotent. `by_limit`: at its most tokens."""
        live = self._live.get(key)
        if live is not None:
            self._lengths.ended(live.job, written, by_limit)
            self.gone(key)

    def refresh(self) -> None:
        """Predict what is left of each live request anew."""
        for each in self._live.values():
            self._count(each)

    def fitting(self, waiting: Iterable[Waiting], blocks: float) -> int:
        """How many of those that wait fit beside the live requests, in their order."""
        return self._memory.fitting(
            ((each.tokens, self._lengths.outlook(each.job, each.written)) for each in waiting), blocks
        )

    @property
    def tokens_at_end(self) -> float:
        """What a live request is expected to hold at its end, in the mean; 0 where there is none."""
        if not self._live:
            return 0.0
        return sum(each.job.prompt_tokens + each.counted + each.left for each in self._live.values()) / len(self._live)

    @property
    def peak_blocks(self) -> float:
        """The most blocks at any future point."""
        return self._memory.peak

    def _count(self, live: _Live) -> None:
        live.counted, live.left = live.written, self._lengths.left(live.job, live.written)
        outlook = self._lengths.outlook(live.job, live.written)
        self._memory.put(live.job.key, live.job.prompt_tokens + live.written, outlook)

    def __contains__(self, key: str) -> bool:
        return key in self._live

    def __len__(self) -> int:
        return len(self._live)
