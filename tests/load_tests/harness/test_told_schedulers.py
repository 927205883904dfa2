"""Schedulers that requests tell what to do: vLLM's heeds the size of steps, and ours does not know how answers end."""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from deployments.policy.temporal.choosing import Way
from load_tests.harness.engines import virtual_pipeline
from load_tests.harness.engines.told_schedulers import (
    CHOOSES,
    LIMIT,
    STEP_TOKENS,
    AsyncToldPhased,
    AsyncToldScheduler,
    ToldPhased,
    ToldScheduler,
)
from load_tests.harness.engines.virtual_pipeline import Asked, Shape, VirtualPipeline, make_scheduler
from tests.deployments.engine.vllm.test_phased_scheduler import STEPS

KINDS: dict[str, type[Scheduler]] = {
    "told": ToldScheduler,
    "told_async": AsyncToldScheduler,
    "phased": ToldPhased,
    "phased_async": AsyncToldPhased,
}
SHAPE = Shape(stages=1, step_tokens=512, seats=16, blocks=500)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_pipeline, "KINDS", KINDS)


def request(name: str, **extra: int) -> Request:
    params = SamplingParams(max_tokens=5, ignore_eos=True, extra_args=extra)
    return Request.from_engine_core_request(
        EngineCoreRequest(name, [7] * 300, None, params, None, 0.0, None, None, None), None
    )


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_of_the_size_that_the_first_request_says(kinds: None, kind: str) -> None:
    scheduler = make_scheduler(kind, SHAPE)
    scheduler.add_request(request("a", **{STEP_TOKENS: 100}))
    scheduler.add_request(request("b"))
    assert scheduler.schedule().total_num_scheduled_tokens == 100


def test_a_run_in_which_ours_chooses_goes_on_with_what_it_chose_before(kinds: None) -> None:
    scheduler = make_scheduler("phased", SHAPE)
    assert isinstance(scheduler, ToldPhased)
    before = scheduler.choosing
    scheduler.begin_run(100)
    assert (scheduler.choosing.way, scheduler._way) == (Way(True, 100), Way(True, 100))
    scheduler.begin_run(CHOOSES)
    assert scheduler.choosing is before
    assert scheduler.max_num_scheduled_tokens == before.way.step_tokens == 512


def test_our_scheduler_knows_the_limit_and_not_the_length(kinds: None) -> None:
    scheduler = make_scheduler("phased", SHAPE)
    assert isinstance(scheduler, ToldPhased)
    assert scheduler._job(request("a", **{LIMIT: 256})).max_tokens == 256
    assert scheduler._job(request("b")).max_tokens == 5


def test_an_answer_that_vllm_ends_at_its_length_is_learned_from(kinds: None) -> None:
    """Else the predictor would know of each answer only that it would have been longer."""
    scheduler = make_scheduler("phased", SHAPE)
    assert isinstance(scheduler, ToldPhased)
    pipeline = VirtualPipeline(scheduler, STEPS)
    for number in range(100):
        pipeline.add(Asked(f"r{number}", 50, 20, 20))  # at most 20, of which it has all
    pipeline.run()
    scheduler.begin_run(100)
    job = scheduler._job(request("next", **{LIMIT: 256}))
    assert scheduler.controller.answers._lengths.left(job, 0) < 40
