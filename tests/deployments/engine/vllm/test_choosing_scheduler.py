"""The scheduler that changes between phases and vLLM's own way: no output is lost, and the faster way is found.

A pipeline that computes nothing runs it (`load_tests.harness.engines.virtual_pipeline`).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from deployments.engine.vllm.choosing_scheduler import AsyncChoosingScheduler, ChoosingScheduler
from deployments.engine.vllm.phased_scheduler import PhasedScheduler
from deployments.messages import Role
from deployments.policy.temporal.choosing import ChoiceRule, Choosing, Done, Prices, Way
from load_tests.harness.engines.virtual_pipeline import Asked, Shape
from tests.deployments.engine.vllm.scheduler_core import make
from tests.deployments.engine.vllm.test_phased_scheduler import SHAPE, Listening, requests
from tests.deployments.engine.vllm.test_scheduler_contract import model

__all__ = ["model"]  # the fixture

BRIEF = ChoiceRule(least_s=0.5, most_s=5.0, least_rest=2, most_rest=4)
PHASED, PLAIN = Way(True, 512), Way(False, 512)


class Restless(Choosing):
    """Another way after every few steps."""

    def __init__(self, steps: int) -> None:
        among = (PHASED, PLAIN, Way(True, 128), Way(False, 128))
        super().__init__(among)
        self._next = itertools.cycle(way for way in among for _ in range(steps))

    @property
    def way(self) -> Way:
        return PHASED

    def observe(self, done: Done, prices: Prices) -> Way:
        return next(self._next)


def listening(kind: str, shape: Shape, asked: list[Asked], choosing: Choosing) -> Listening:
    made = Listening(kind, shape, asked)
    assert isinstance(made.scheduler, ChoosingScheduler)
    made.scheduler.choosing = choosing
    made.scheduler._take(choosing.way)
    return made


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3, 20])
def test_no_output_is_lost_however_often_the_way_changes(stages: int, steps: int) -> None:
    made = listening("choosing", Shape(stages, 512, 64, 1500), requests(120), Restless(steps))
    outcome = made.run()
    assert {"prefill", "decode", "mixed"} == set(outcome.step_kinds)
    assert isinstance(made.scheduler, PhasedScheduler)
    assert len(made.scheduler.controller.answers) == made.scheduler.controller.answers.peak_blocks == 0


@pytest.mark.parametrize("steps", [1, 20])
def test_with_asynchronous_scheduling_nothing_is_lost_either(steps: int) -> None:
    listening("choosing_async", Shape(1, 512, 64, 1500), requests(120), Restless(steps)).run()


def test_requests_that_are_preempted_on_the_way_finish() -> None:
    asked = requests(60)
    outcome = listening("choosing", Shape(2, 512, 64, 150), asked, Restless(5)).pipeline.run()
    assert outcome.preemptions > 0
    assert outcome.tokens == {each.name: each.output_tokens for each in asked}


def test_the_scheduler_stays_with_what_is_faster() -> None:
    """Steps of 2,048 tokens beside steps of answers leave four stages with long bubbles, and phases do not."""
    shape = Shape(4, 2048, 64, 3000)
    asked = [Asked(f"r{number}", 600, 60 + number % 40, 300) for number in range(600)]
    made = listening("choosing", shape, asked, Choosing((Way(False, 2048), Way(True, 2048)), BRIEF))
    assert isinstance(made.scheduler, ChoosingScheduler)
    while len(made.ended) < 500:
        made.pipeline.turn()
    assert made.scheduler.choosing.incumbent == Way(True, 2048)


def test_steps_are_of_the_size_of_the_way() -> None:
    made = listening("choosing", SHAPE, requests(40), Choosing((Way(False, 128),)))
    assert made.scheduler.schedule().total_num_scheduled_tokens == 128
    assert made.scheduler.controller._shape.step_tokens == 128


def test_in_vllms_way_prompts_are_beside_answers() -> None:
    kinds = listening("choosing", SHAPE, requests(120), Choosing((PLAIN,))).run().step_kinds
    assert kinds.count("mixed") > kinds.count("prefill")
    phased = listening("choosing", SHAPE, requests(120), Choosing((PHASED,))).run().step_kinds
    assert phased.count("mixed") < phased.count("prefill")


def test_what_came_is_what_is_counted() -> None:
    """Each prompt once, and each token once, also with preemptions."""

    class Counting(Choosing):
        prompts = answers = 0
        seconds = 0.0

        def observe(self, done: Done, prices: Prices) -> Way:
            self.prompts += done.prompt_tokens
            self.answers += done.answer_tokens
            self.seconds += done.seconds
            return self.way

    asked, counting = requests(80), Counting((PLAIN,))
    outcome = listening("choosing", Shape(2, 512, 64, 150), asked, counting).pipeline.run()
    assert outcome.preemptions > 0
    assert counting.prompts == sum(each.prompt_tokens for each in asked)
    assert counting.answers == sum(each.output_tokens for each in asked)
    assert counting.seconds == pytest.approx(outcome.seconds, rel=0.1), "but for the first step"


def test_a_pool_that_chooses_gets_the_scheduler(model: Path) -> None:
    core = make(model, Role.MIXED, settings={"phases": "auto"})
    assert isinstance(core.scheduler, ChoosingScheduler)
    assert core.scheduler.choosing.way.phased is False, "it has one stage"
    extra = core.scheduler.vllm_config.kv_transfer_config.kv_connector_extra_config
    assert "pace" not in extra


def test_asynchronous_scheduling_is_mixed_in_behind_ours() -> None:
    order = AsyncChoosingScheduler.__mro__
    assert order.index(PhasedScheduler) < order.index(AsyncScheduler)
