"""The scheduler in phases, with vLLM's real classes and no model: nothing is lost, and batches are even.

A pipeline that computes nothing runs it (`load_tests.harness.engines.virtual_pipeline`).
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from deployments.engine.vllm.phased_scheduler import AsyncPhasedScheduler, PhasedScheduler
from deployments.messages import Role, StepSample
from deployments.policy.temporal.controller import Controller, EngineShape, Order, Phase
from deployments.policy.temporal.intensity import SwitchRule
from deployments.step_cost import Coefficients
from load_tests.harness.engines.virtual_pipeline import Asked, Outcome, Shape, VirtualPipeline, make_scheduler
from tests.deployments.engine.vllm.scheduler_core import make
from tests.deployments.engine.vllm.test_scheduler_contract import model, tokens

__all__ = ["model"]  # the fixture

STEPS = Coefficients(0.02, 0.0001, 1e-9, 0.0001, 1e-8)
SHAPE = Shape(stages=4, step_tokens=512, seats=64, blocks=1500)


def requests(count: int, seed: int = 1, mean: int = 60) -> list[Asked]:
    rng = random.Random(seed)
    lengths = [max(1, min(300, round(rng.expovariate(1 / mean)))) for _ in range(count)]
    return [Asked(f"r{number}", rng.randint(5, 900), length, 300) for number, length in enumerate(lengths)]


class Listening:
    """A pipeline whose scheduler's outputs are all accounted for.

    `batches`: the sizes of the decode batches, in their order. `under_way`: outputs that are not back.
    """

    def __init__(self, kind: str, shape: Shape, asked: list[Asked]) -> None:
        self.scheduler = make_scheduler(kind, shape)
        self.pipeline = VirtualPipeline(self.scheduler, STEPS, heard=self._hear)
        self.asked = asked
        self.under_way: list[int] = []
        self.ended: Counter[str] = Counter()
        self.batches: list[int] = []
        for each in asked:
            self.pipeline.add(each)

    def _hear(self, what: str, output: SchedulerOutput) -> None:
        if what == "returned":
            self.under_way.remove(id(output))
            return
        self.under_way.append(id(output))
        self.ended.update(output.finished_req_ids)
        sizes = set(output.num_scheduled_tokens.values())
        if sizes == {1}:
            self.batches.append(len(output.num_scheduled_tokens))

    def run(self) -> Outcome:
        outcome = self.pipeline.run()
        assert outcome.tokens == {each.name: each.output_tokens for each in self.asked}, "every answer is whole"
        assert self.under_way == [], "every output came back"
        assert self.ended == Counter(each.name for each in self.asked), "workers are told of each end, once"
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == SHAPE.blocks - 1
        return outcome


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_request_finishes_and_no_output_is_lost(stages: int) -> None:
    listening = Listening("phased", Shape(stages, 512, 64, 1500), requests(120))
    outcome = listening.run()
    assert outcome.preemptions == 0
    assert isinstance(listening.scheduler, PhasedScheduler)
    answers = listening.scheduler.controller.answers
    assert len(answers) == answers.peak_blocks == 0


@pytest.mark.parametrize("stages", [1, 4])
def test_a_step_computes_prompts_or_answers_in_long_phases(stages: int) -> None:
    outcome = Listening("phased", Shape(stages, 512, 64, 1500), requests(200)).run()
    assert set(outcome.step_kinds) <= {"prefill", "decode", "mixed"}
    # The last token of a prompt that is computed alone counts as decoding.
    assert outcome.step_kinds.count("mixed") <= outcome.step_kinds.count("prefill") / 10
    assert outcome.switches < len(outcome.step_kinds) / 8


def test_the_batches_of_the_pipeline_are_even() -> None:
    """Without evening, the batch that is the first of a phase has all the requests that are ready then."""
    listening = Listening("phased", SHAPE, [Asked(f"r{number}", 50, 100, 100) for number in range(50)])
    listening.run()
    middle = listening.batches[8:40]
    assert max(middle) - min(middle) <= 1


def test_with_asynchronous_scheduling_nothing_is_lost_either() -> None:
    shape = Shape(1, 512, 64, 1500)
    assert Listening("phased_async", shape, requests(150)).run().preemptions == 0


def test_with_too_little_memory_requests_are_preempted_and_finish() -> None:
    """Predicted lengths are wrong here: the predictor has learned that answers are short."""
    asked = [Asked(f"r{number}", 100, 2, 150) for number in range(48)]
    asked += [Asked(f"long{number}", 100, 140, 150) for number in range(32)]
    scheduler = make_scheduler("phased", Shape(2, 512, 64, 120))
    pipeline = VirtualPipeline(scheduler, STEPS)
    for each in asked:
        pipeline.add(each)
    outcome = pipeline.run()
    assert outcome.tokens == {each.name: each.output_tokens for each in asked}
    assert outcome.preemptions > 0


def test_requests_that_are_aborted_in_the_middle_leave_nothing() -> None:
    rng = random.Random(3)
    scheduler = make_scheduler("phased", SHAPE)
    assert isinstance(scheduler, PhasedScheduler)
    pipeline, names = VirtualPipeline(scheduler, STEPS), [each.name for each in requests(120)]
    for each in requests(120):
        pipeline.add(each)
    while scheduler.has_requests():
        pipeline.turn()
        if names and rng.random() < 0.2:
            scheduler.finish_requests(names.pop(rng.randrange(len(names))), RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == SHAPE.blocks - 1
    assert len(scheduler.controller.answers) == 0


def test_a_paused_engine_stays_paused() -> None:
    scheduler = make_scheduler("phased", SHAPE)
    pipeline = VirtualPipeline(scheduler, STEPS)
    pipeline.add(Asked("a", 50, 10, 20))
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(8):
        assert scheduler.schedule().num_scheduled_tokens == {}
    assert scheduler.pause_state is PauseState.PAUSED_ALL
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert pipeline.run().tokens == {"a": 10}


def test_an_old_order_does_not_stop_the_engine() -> None:
    scheduler = make_scheduler("phased", SHAPE)
    assert isinstance(scheduler, PhasedScheduler)

    class Silent(Controller):
        """Never says anything new."""

        def decide(self, sight: object) -> Order:
            return Order(Phase.DECODE)

    scheduler.controller = Silent(EngineShape(4, 512, 64, 1499, 16), STEPS)
    pipeline = VirtualPipeline(scheduler, STEPS)
    for each in requests(30):
        pipeline.add(each)
    assert len(pipeline.run().tokens) == 30


def test_lengths_are_learned_from_the_answers_that_end() -> None:
    scheduler = make_scheduler("phased", SHAPE)
    assert isinstance(scheduler, PhasedScheduler)
    pipeline = VirtualPipeline(scheduler, STEPS)
    for number in range(200):
        pipeline.add(Asked(f"r{number}", 100, 20, 1000))
    pipeline.run()
    request = Request("next", [7] * 100, SamplingParams(max_tokens=1000), None)
    assert scheduler.controller.answers._lengths.left(scheduler._job(request), 0) < 40


def test_the_controller_may_be_of_another_rule() -> None:
    listening = Listening("phased", SHAPE, requests(100))
    assert isinstance(listening.scheduler, PhasedScheduler)
    shape = EngineShape(4, 512, 64, 1499, 16)
    listening.scheduler.controller = Controller(shape, STEPS, rule=SwitchRule(least_steps=0.0, least_rounds=1))
    listening.run()


# ---- what is given to vLLM


def test_a_pool_in_phases_gets_the_scheduler_and_no_pace(model: Path) -> None:
    core = make(model, Role.MIXED, settings={"phases": True})
    assert type(core.scheduler) is PhasedScheduler
    extra = core.scheduler.vllm_config.kv_transfer_config.kv_connector_extra_config
    assert "pace" not in extra, "it would count the requests that a step may not compute"


def test_beside_a_connector_prompts_and_answers_are_apart(model: Path) -> None:
    core = make(model, Role.MIXED, settings={"phases": True})
    core.add("a", tokens(20))
    assert core.step() == {"a": 20}
    core.add("b", tokens(30)[::-1])
    steps = [core.step() for _ in range(20)]
    assert not any(len(step) == 2 and max(step.values()) > 1 for step in steps)
    assert {"b": 30} in steps


def test_what_was_loaded_from_elsewhere_begins_in_a_decode_phase_too(model: Path) -> None:
    core = make(model, Role.MIXED, settings={"phases": True})
    core.connector.matched = (32, True)
    core.add("coming", tokens(33))
    core.step()
    core.connector.matched = (0, False)
    core.add("a", tokens(20)[::-1])
    assert core.step() == {"a": 20}
    assert core.step(received={"coming"}) == {"a": 1}
    assert core.step() == {"a": 1, "coming": 1}


def test_the_steps_that_a_connector_reports_are_learned_from(model: Path) -> None:
    core = make(model, Role.MIXED, settings={"phases": True})
    assert isinstance(core.scheduler, PhasedScheduler)
    before = core.scheduler.controller._steps.count
    core.scheduler.controller.learn(StepSample(0.1, 100, 0, 0, 0))
    assert core.scheduler.controller._steps.count == before + 1


# ---- what is private in vLLM (docs/contributing/upgrading-vllm.md)


def parameters(function: object) -> list[str]:
    assert callable(function)
    return list(inspect.signature(function).parameters)


def test_vllm_still_has_what_the_scheduler_overrides() -> None:
    assert parameters(Scheduler.schedule) == ["self", "throttle_prefills"]
    assert parameters(Scheduler.update_from_output) == ["self", "scheduler_output", "model_runner_output"]
    assert parameters(Scheduler._preempt_request)[:2] == ["self", "request"]
    assert parameters(Scheduler._free_request)[:2] == ["self", "request"]
    assert AsyncPhasedScheduler.__mro__.index(PhasedScheduler) < AsyncPhasedScheduler.__mro__.index(AsyncScheduler)


def test_vllm_still_has_what_the_scheduler_reads_and_sets() -> None:
    source = inspect.getsource(Scheduler.schedule)
    for used in (
        "self.running",
        "self.max_num_active_reqs",
        "PauseState.UNPAUSED",
        "request.next_decode_eligible_step",
    ):
        assert used in source
    request = Request("a", [1, 2], SamplingParams(max_tokens=1000), None)
    for name in ("is_prefill_chunk", "num_output_placeholders", "num_tokens_with_spec", "num_computed_tokens"):
        assert hasattr(request, name)
