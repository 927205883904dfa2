"""How large the next step of a vLLM engine is: as many prompt tokens as its running answers allow.

vLLM takes a fixed number of tokens a step. Its scheduler reads that number, and the most tokens of one prompt, whenever
it schedules a step; here both are set before each. What steps take is learned from the engine's own steps.
tests/deployments/engine/vllm/test_scheduler_contract.py checks that the scheduler heeds what is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from deployments.messages import StepSample
from deployments.policy.prediction.step_time import StepModel
from deployments.policy.step_size import LOOKED_AT, prompt_budget, share_of_each, share_of_one
from deployments.step_cost import Coefficients
from transfer.vllm.handoff_part import handed_over, part_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
"""The status of a request whose KV cache is on its way to this engine."""

TPOT_S = "baton_tpot_s"
"""A request's `extra_args` hold the TPOT objective of its class under this name, in seconds."""


class StepPace:
    """Sets the size of each step of one scheduler.

    vLLM gives tokens to what runs first, also to prompts, and what is left to what waits. An answer that another
    replica hands over waits twice: for memory, and for its KV cache. So prompts leave it a token: one for each answer
    whose KV cache has come, and one if any waits for memory, which vLLM gives only while a token is left.

    `prior`: what steps take, before any was seen. `prompt_share`: as in the configuration.
    """

    def __init__(self, scheduler: Scheduler, prior: Coefficients, prompt_share: float) -> None:
        self._scheduler, self._prompt_share = scheduler, prompt_share
        self._model = StepModel(prior)
        self._whole = scheduler.max_num_scheduled_tokens
        self._answers = self._context = self._begun = 0
        self._prompts: list[int] = []
        self._begun_prompts: list[int] = []
        self._coming: set[str] = set()
        self._arrived, self._asks = 0, False
        self._objectives: set[float] = set()

    def begin(self, request: Request) -> None:
        """A request has come, and waits for the next step. One that is handed over goes first: it computes nothing."""
        if _is_handed_over(request):
            self._scheduler.waiting.remove_request(request)
            self._scheduler.waiting.prepend_request(request)
            self._asks = True
        else:
            self._prompts.append(handed_over(request))
        self._set()

    def arrived(self, request_ids: Iterable[str]) -> None:
        """The KV cache of these requests has come."""
        self._arrived += len(self._coming.intersection(request_ids))
        self._set()

    def plan(self, scheduled: Mapping[str, int]) -> None:
        """Set the size of the next step. `scheduled`: the tokens of the step that was scheduled now, by request."""
        running = self._scheduler.running
        left = {each.request_id: _left(each, scheduled) for each in running}
        # Engines serve in this order: answers first, so that a step leaves none out, then prompts as they came.
        running.sort(key=lambda request: left[request.request_id] > 0)
        answering = [each for each in running if left[each.request_id] <= 0]
        prompts = running[len(answering) :]
        coming = [each for each in self._scheduler.kv_holding_waiting if each.status is LOADING]
        self._coming = {each.request_id for each in coming if _is_handed_over(each)}
        self._arrived = len(self._coming & self._scheduler.finished_recving_kv_req_ids)
        waiting = list(islice(self._scheduler.waiting, LOOKED_AT))
        self._asks = any(map(_is_handed_over, waiting))
        self._begun_prompts = [left[each.request_id] for each in prompts]
        not_begun = [handed_over(each) for each in waiting if not _is_handed_over(each)]
        self._answers, self._prompts = len(answering), self._begun_prompts + not_begun
        self._context = sum(each.num_tokens for each in answering)
        self._begun = handed_over(prompts[0]) - left[prompts[0].request_id] if prompts else 0
        self._objectives = set(map(_objective_s, (*answering, *coming)))
        self._set()

    def learn(self, step: StepSample) -> None:
        """A step is over."""
        self._model.observe(step)

    def _set(self) -> None:
        steps, answers, joining = self._model.coefficients, self._answers, self._arrived + self._asks
        share = self._prompt_share
        budget = prompt_budget(steps, self._whole, answers, self._context, self._begun, self._objectives, share)
        budget = max(1, min(budget, self._whole - answers - joining))
        self._scheduler.max_num_scheduled_tokens = min(budget + answers + joining, self._whole)
        one = share_of_one(budget, self._prompts)
        if joining:
            one = min(one, share_of_each(budget, self._begun_prompts))
        self._scheduler.scheduler_config.long_prefill_token_threshold = one if one < self._whole else 0


def _is_handed_over(request: Request) -> bool:
    """Whether another replica writes the KV cache of all of the request's prompt."""
    part = part_of(request)
    return part is not None and part.role == "decode"


def _objective_s(request: Request) -> float:
    """The TPOT objective of an answer; 0 where it has none."""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    return float((extra or {}).get(TPOT_S, 0.0))


def _left(request: Request, scheduled: Mapping[str, int]) -> int:
    """The tokens of a request's prompt that are yet to be computed after the step that was scheduled now."""
    return handed_over(request) - int(request.num_computed_tokens) - scheduled.get(request.request_id, 0)
