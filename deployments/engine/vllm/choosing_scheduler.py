"""vLLM's scheduler in phases or without, and with steps of one of a few sizes: as its own throughput speaks for.

`deployments.policy.temporal.choosing` decides. Between two steps this scheduler becomes vLLM's own, which computes
prompts beside answers, or ours again. Requests do not notice, and each output of vLLM is passed on.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from deployments.engine.vllm.phased_scheduler import PhasedScheduler
from deployments.policy.temporal.choosing import Choosing, Done, Prices, Way, prices, ways

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput


class ChoosingScheduler(PhasedScheduler):
    """Schedules in the way that is the fastest. `choosing`: decides. `clock`: seconds, from any moment on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = self._shape()
        self.choosing = Choosing(ways(shape.stages, shape.step_tokens, shape.seats))
        self.clock = time.monotonic
        self._looked_s = math.inf
        self._take(self.choosing.way)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step, in phases or as vLLM has it."""
        if self._way.phased:
            return super().schedule(throttle_prefills)
        output: SchedulerOutput = super(PhasedScheduler, self).schedule(throttle_prefills)
        self._note_begun(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        way = self.choosing.observe(self._done(outputs), self._prices())
        if way != self._way:
            self._take(way)
        return outputs

    def _take(self, way: Way) -> None:
        self._way = way
        self._withheld.clear()
        self.max_num_scheduled_tokens = way.step_tokens
        self.controller.resize(way.step_tokens)

    def _done(self, outputs: dict[int, EngineCoreOutputs]) -> Done:
        since_s, self._looked_s = self._looked_s, self.clock()
        came = [output for each in outputs.values() for output in each.outputs]
        first = [each.prefill_stats for each in came if each.prefill_stats is not None]
        return Done(
            seconds=max(self._looked_s - since_s, 0.0),
            prompt_tokens=sum(each.num_prompt_tokens for each in first),
            answer_tokens=sum(len(each.new_token_ids) for each in came),
            is_full=bool(self.waiting),
            cycles=self.controller.switches // 2,
            begun=len(first),
            live=len(self.running),
        )

    def _prices(self) -> Prices:
        live = max(len(self.running), 1)
        context = sum(each.num_tokens for each in self.running) / live
        stages = self.parallel_config.pipeline_parallel_size
        return prices(self.controller.steps, self._way.step_tokens, live / stages, context)


class AsyncChoosingScheduler(ChoosingScheduler, AsyncScheduler):
    """The same where vLLM schedules a step before the last one has ended."""
