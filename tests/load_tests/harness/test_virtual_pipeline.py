"""The pipeline in virtual time: steps take as long as they should, and stages work one behind the other."""

from __future__ import annotations

import inspect

import pytest
from vllm.v1.engine.core import EngineCore

from deployments.step_cost import Coefficients
from load_tests.harness.engines.virtual_pipeline import Asked, Outcome, Shape, run

STEPS = Coefficients(0.4, 0.001, 0.0, 0.01, 0.0)


def ran(stages: int, asked: list[Asked], hop_s: float = 0.0) -> Outcome:
    return run("default", Shape(stages, 512, 64, 500), asked, STEPS, hop_s)


def test_on_one_stage_a_step_follows_the_other() -> None:
    outcome = ran(1, [Asked("a", 100, 11, 20)])
    assert outcome.tokens == {"a": 11}
    assert outcome.step_kinds == ["prefill"] + ["decode"] * 10
    assert outcome.seconds == pytest.approx(0.4 + 100 * 0.001 + 10 * 0.41)
    assert outcome.busy_s == pytest.approx(outcome.seconds)
    assert outcome.switches == 1


def test_one_request_gains_nothing_from_a_pipeline() -> None:
    """It is on one stage at a time, and the others wait."""
    outcome = ran(4, [Asked("a", 100, 11, 20)], hop_s=0.01)
    assert outcome.seconds == pytest.approx(0.5 + 10 * 0.41 + 11 * 4 * 0.01)
    assert outcome.busy_s == pytest.approx(0.5 + 10 * 0.41)


def test_batches_under_way_overlap() -> None:
    """Four prompts of a step each fill four stages, and so do the four batches that they leave."""
    asked = [Asked(f"r{number}", 512, 100, 200) for number in range(4)]
    outcome = ran(4, asked)
    assert 1.0 - outcome.busy_s / 4 / outcome.seconds < 0.1
    assert outcome.seconds == pytest.approx(ran(4, asked[:1]).seconds, rel=0.05), "as long as one of them alone"


def test_it_does_what_the_engine_core_does() -> None:
    """When this fails, compare `VirtualPipeline.turn` with the engine core."""
    source = inspect.getsource(EngineCore.step_with_batch_queue)
    for line in ("len(batch_queue) < self.batch_queue_size", "batch_queue.pop()", "self.scheduler.update_from_output("):
        assert line in source
