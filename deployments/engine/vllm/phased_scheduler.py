"""vLLM's scheduler in phases: each step computes prompts alone or answers alone, as a control plane orders.

This is the engine plane of `deployments.policy.temporal.controller`. It replaces nothing in vLLM: it is a scheduler
class, which vLLM is given by name. Before each step it leaves in the scheduler's list of running requests only those
that the step may compute, and puts the others back behind it. vLLM's own `schedule` runs exactly once for each step,
and what it returns is passed on, also where nothing is in it: an output tells workers and connectors which requests
have ended and which blocks were given, and vLLM tells it once.

tests/deployments/engine/vllm/test_phased_scheduler.py runs it with vLLM's real class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.engine.vllm.description import prior_of
from deployments.fleet.columns import UNKNOWN
from deployments.policy.temporal.answers import Waiting
from deployments.policy.temporal.controller import Controller, EngineShape, Order, Phase, Sight, in_effect
from deployments.policy.temporal.lengths import Job
from deployments.step_cost import Coefficients

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

LOOKED_AT = 128
"""The most waiting requests that a decision looks at. A prefill phase of more of them is worth no less."""

COMPLETE = {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}
"""The ends of requests whose answers have their own length."""


class PhasedScheduler(Scheduler):
    """Prefill phases and decode phases, with the batches of a pipeline evened. `controller`: decides."""

    running: list[Request]
    max_num_active_reqs: int
    _pause_state: PauseState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.controller = Controller(self._shape(), self._prior())
        self._order = Order(Phase.PREFILL, 1)
        self._withheld: set[str] = set()

    def _shape(self) -> EngineShape:
        return EngineShape(
            stages=self.parallel_config.pipeline_parallel_size,
            step_tokens=self.max_num_scheduled_tokens,
            seats=self.max_num_active_reqs,
            blocks=self.kv_cache_manager.block_pool.num_gpu_blocks - 1,  # one is vLLM's null block
            block_tokens=self.block_size,
        )

    def _prior(self) -> Coefficients:
        prior = prior_of(self.vllm_config, None)
        return Coefficients(*prior) if prior else UNKNOWN

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step, of one kind."""
        order = self._in_effect()
        had = order.phase is Phase.PREFILL and (order.admit > 0 or any(map(_is_prefilling, self.running)))
        with self._only_prompts(order.admit) if order.phase is Phase.PREFILL else self._only_answers():
            output = super().schedule(throttle_prefills)
        self._note_begun(output)
        # The step is with the workers, or about to be. What is decided now counts from the next step on.
        blocked = had and not output.total_num_scheduled_tokens
        self._order = self.controller.decide(self._sight(output.total_num_scheduled_tokens, blocked))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            if (request := self.requests.get(request_id)) is not None:
                self.controller.answers.wrote(request_id, request.num_output_tokens)
        return outputs

    # ---- what a step may compute

    def _in_effect(self) -> Order:
        prefilling, waiting = sum(map(_is_prefilling, self.running)), len(self.waiting)
        return in_effect(self._order, live=len(self.running) - prefilling, prefilling=prefilling, waiting=waiting)

    @contextlib.contextmanager
    def _only_prompts(self, admit: int) -> Iterator[None]:
        """Begun prompts are visible, and `admit` more requests may begin, beside those that hold their memory."""
        begun = list(filter(_is_prefilling, self.running))
        with self._visible(begun, len(begun) + len(self.kv_holding_waiting) + admit):
            yield

    @contextlib.contextmanager
    def _only_answers(self) -> Iterator[None]:
        """An even share of the answers that are not under way is visible. Only what was loaded from elsewhere, and has
        its memory, may begin."""
        live = [each for each in self.running if not _is_prefilling(each)]
        ready = list(filter(self._is_ready, live))
        ready.sort(key=lambda request: request.request_id not in self._withheld)
        size = self.controller.batch(len(ready), len(live))
        batch = {each.request_id for each in ready[:size]}
        self._withheld = {each.request_id for each in ready[size:]}
        paused = self._pause_state
        if paused is PauseState.UNPAUSED:
            self._pause_state = PauseState.PAUSED_NEW
        try:
            # In the order of the whole list: where memory is short, vLLM preempts the last one.
            with self._visible([each for each in live if each.request_id in batch], self.max_num_active_reqs):
                yield
        finally:
            self._pause_state = paused

    @contextlib.contextmanager
    def _visible(self, requests: list[Request], most: int) -> Iterator[None]:
        """Only these of the running requests are in vLLM's list, and it may grow to `most`, within all seats."""
        before, seats = self.running, self.max_num_active_reqs
        seen = {each.request_id for each in requests}
        self.running = requests
        self.max_num_active_reqs = min(most, seats - (len(before) - len(requests)))
        try:
            yield
        finally:
            left = {each.request_id for each in self.running}
            stayed = [each for each in before if each.request_id in left or each.request_id not in seen]
            self.running = stayed + [each for each in self.running if each.request_id not in seen]
            self.max_num_active_reqs = seats

    def _is_ready(self, request: Request) -> bool:
        """Whether vLLM would compute a token of it now. What is under way in the pipeline has none."""
        left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return bool(left > 0 and request.next_decode_eligible_step <= self.current_step + 1)

    # ---- what the control plane is told

    def _sight(self, scheduled: int, blocked: bool) -> Sight:
        live = [each for each in self.running if not _is_prefilling(each)]
        first = islice(self.waiting, LOOKED_AT)
        return Sight(
            waiting=tuple(Waiting(self._job(each), each.num_output_tokens) for each in first),
            waiting_count=len(self.waiting),
            prefilling=len(self.running) - len(live),
            live=len(live),
            context=sum(each.num_tokens for each in live),
            scheduled=scheduled,
            blocked=blocked,
        )

    def _note_begun(self, output: SchedulerOutput) -> None:
        begun = chain((new.req_id for new in output.scheduled_new_reqs), output.scheduled_cached_reqs.resumed_req_ids)
        for request_id in begun:
            request = self.requests[request_id]
            self.controller.answers.began(self._job(request), request.num_output_tokens)

    def _job(self, request: Request) -> Job:
        most = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        return Job(request.request_id, request.num_prompt_tokens, most)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.controller.answers.gone(request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._withheld.discard(request.request_id)
        if request.status in COMPLETE:
            by_limit = request.status is RequestStatus.FINISHED_LENGTH_CAPPED
            self.controller.answers.ended(request.request_id, request.num_output_tokens, by_limit)
        self.controller.answers.gone(request.request_id)
        return super()._free_request(request, *args, **kwargs)


class AsyncPhasedScheduler(PhasedScheduler, AsyncScheduler):
    """The same where vLLM schedules a step before the last one has ended."""


def _is_prefilling(request: Request) -> bool:
    """Whether a part of its prompt is yet to be scheduled."""
    return bool(request.is_prefill_chunk)
