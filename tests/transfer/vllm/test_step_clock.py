"""What a step computed and how long it took, from when it was scheduled and when it was over."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from transfer.vllm.step_clock import StepClock, StepReport


@dataclass
class Step:
    """As vLLM's `SchedulerOutput`."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: Any = field(default_factory=lambda: SimpleNamespace(req_ids=[], num_computed_tokens=[]))


def step(new: dict[str, tuple[int, int]] | None = None, known: dict[str, tuple[int, int]] | None = None) -> Step:
    """`new`, `known`: tokens before the step and tokens in it, by request id."""
    new, known = new or {}, known or {}
    tokens = {request_id: tokens for request_id, (_, tokens) in (new | known).items()}
    fresh = [SimpleNamespace(req_id=request_id, num_computed_tokens=before) for request_id, (before, _) in new.items()]
    cached = SimpleNamespace(req_ids=list(known), num_computed_tokens=[before for before, _ in known.values()])
    return Step(tokens, fresh, cached)


def timed(clock: StepClock, one: Step, began_s: float, ended_s: float) -> StepReport | None:
    clock.begin(one, began_s)
    return clock.end(ended_s)


def test_a_prompts_chunk_counts_what_lies_before_each_of_its_tokens() -> None:
    report = timed(StepClock(), step(new={"a": (0, 4)}, known={"b": (100, 3)}), 10.0, 10.5)
    assert report == StepReport(
        0.5, prefill_tokens=7, prefill_context=0 + 1 + 2 + 3 + 100 + 101 + 102, decode_sequences=0, decode_context=0
    )


def test_a_sequence_that_decodes_holds_what_it_computed_and_its_next_token() -> None:
    report = timed(StepClock(), step(new={"landed": (50, 1)}, known={"a": (9, 1), "b": (19, 1)}), 0.0, 1.0)
    assert report == StepReport(
        1.0, prefill_tokens=0, prefill_context=0, decode_sequences=3, decode_context=51 + 10 + 20
    )


def test_a_step_with_nothing_in_it_is_not_told_of_and_nothing_is_kept_of_it() -> None:
    clock = StepClock()
    assert timed(clock, step(), 0.0, 1.0) is None
    assert clock.end(2.0) is None
    report = timed(clock, step(new={"a": (0, 2)}), 3.0, 3.25)
    assert report is not None
    assert report.seconds == 0.25


def test_what_lies_between_two_steps_of_one_request_belongs_to_the_later() -> None:
    clock = StepClock()
    timed(clock, step(new={"a": (0, 8)}), 0.0, 1.0)
    report = timed(clock, step(new={"b": (0, 8)}, known={"a": (8, 1)}), 1.1, 2.0)
    assert report is not None
    assert report.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("between", [[], [step()]])
def test_idleness_is_no_part_of_a_step(between: list[Step]) -> None:
    clock = StepClock()
    timed(clock, step(new={"a": (0, 8)}), 0.0, 1.0)
    for empty in between:
        assert timed(clock, empty, 2.0, 3.0) is None
    report = timed(clock, step(known={"a": (8, 1)}) if between else step(new={"b": (0, 8)}), 50.0, 50.5)
    assert report is not None
    assert report.seconds == pytest.approx(0.5)


def test_steps_that_overlap_share_no_second() -> None:
    """With asynchronous scheduling the next step is scheduled before the last one is over."""
    clock = StepClock()
    clock.begin(step(new={"a": (0, 8)}), 0.0)
    clock.begin(step(known={"a": (8, 1)}), 0.1)
    first = clock.end(1.0)
    clock.begin(step(new={"b": (0, 4)}), 1.1)
    second, third = clock.end(1.5), clock.end(1.75)
    assert first is not None
    assert second is not None
    assert third is not None
    assert [report.seconds for report in (first, second, third)] == pytest.approx([1.0, 0.5, 0.25])
    assert [report.prefill_tokens for report in (first, second, third)] == [8, 0, 4]


def test_a_report_travels_in_vllms_statistics() -> None:
    report = StepReport(0.5, 1, 2, 3, 4)
    assert not report.is_empty()
    assert report.to_dict() == {"step": (0.5, 1, 2, 3, 4)}


def test_a_step_is_computed_until_it_is_over_also_beside_one_with_nothing_in_it() -> None:
    clock = StepClock()
    clock.begin(step(), 0.0)
    assert not clock.is_computing
    clock.begin(step(new={"a": (0, 4)}), 0.0)
    clock.begin(step(), 0.0)
    clock.end(1.0)
    assert clock.is_computing
    clock.end(2.0)
    assert not clock.is_computing
