"""Schedulers that a benchmark tells what to do by its requests: one started engine can then be measured in many ways.

The `extra_args` of a request say it. Each class is one of vLLM's or ours, and does nothing else differently.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from deployments.engine.vllm.choosing_scheduler import ChoosingScheduler
from deployments.policy.temporal.answers import LiveAnswers
from deployments.policy.temporal.choosing import Choosing, Way
from deployments.policy.temporal.lengths import AnswerLengths, Job

STEP_TOKENS = "bench_step_tokens"
"""The most tokens of a step from this request on, the first of a run. `CHOOSES`: our scheduler decides that,
and whether it works in phases; otherwise it does."""
CHOOSES = 0
LIMIT = "bench_limit"
"""The length up to which the answer may go, as far as a scheduler may know. Its `max_tokens` is how long it will be."""


def told(request: Request, name: str) -> Any:
    """What a request says; None where it says nothing."""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    return (extra or {}).get(name)


class ToldScheduler(Scheduler):
    """vLLM's own, with steps of the size that it is told."""

    def add_request(self, request: Request) -> None:
        if (tokens := told(request, STEP_TOKENS)) is not None:
            self.begin_run(tokens)
        super().add_request(request)

    def begin_run(self, step_tokens: int) -> None:
        """A run begins. `step_tokens`: the most of a step."""
        self.max_num_scheduled_tokens = step_tokens


class AsyncToldScheduler(ToldScheduler, AsyncScheduler):
    """The same where vLLM schedules a step before the last one has ended."""


class UnlimitedAnswers(LiveAnswers):
    """No answer here ends because it may not be longer."""

    def ended(self, key: str, written: int, by_limit: bool) -> None:
        super().ended(key, written, by_limit=False)


class ToldPhased(ToldScheduler, ChoosingScheduler):
    """Ours. It does not know how long an answer will be, though vLLM does. What it learns it keeps from run to run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chosen = self.choosing
        self.controller.answers = UnlimitedAnswers(AnswerLengths(), self.block_size)

    def begin_run(self, step_tokens: int) -> None:
        self.choosing = self._chosen if step_tokens == CHOOSES else Choosing((Way(True, step_tokens),))
        self._take(self.choosing.way)

    def _job(self, request: Request) -> Job:
        job = super()._job(request)
        return Job(job.key, job.prompt_tokens, told(request, LIMIT) or job.max_tokens)


class AsyncToldPhased(ToldPhased, AsyncScheduler):
    """The same where vLLM schedules a step before the last one has ended."""
