"""Phases by the controller, over an engine of counted steps: it never stands still, however late orders come."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.messages import StepSample
from deployments.policy.temporal.answers import LiveAnswers, Waiting
from deployments.policy.temporal.controller import (
    Controller,
    EngineShape,
    Methods,
    Order,
    Phase,
    Sight,
    in_effect,
)
from deployments.policy.temporal.intensity import SwitchRule
from deployments.policy.temporal.lengths import AnswerLengths, Job
from deployments.policy.temporal.memory import Outlook, until
from deployments.step_cost import Coefficients

STEPS = Coefficients(0.05, 0.0002, 0.0, 0.0002, 1e-8)
SHAPE = EngineShape(stages=4, step_tokens=2048, seats=64, blocks=600, block_tokens=16)
EAGER = SwitchRule(least_steps=0.0, margin=0.0, least_rounds=1)


@dataclass
class Engine:
    """The engine plane of a pipeline, without vLLM and without time: a step returns `stages` steps later.

    `late`: the steps that an order needs to get here. `switches`: changes between prefill and decode steps.
    """

    controller: Controller
    shape: EngineShape
    lengths: dict[str, int]
    late: int = 0
    waiting: deque[Waiting] = field(default_factory=deque)
    written: dict[str, int] = field(default_factory=dict)
    ready: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    kinds: list[Phase] = field(default_factory=list)
    most_tokens: int = 0

    def __post_init__(self) -> None:
        self._under_way: deque[list[str]] = deque()
        self._orders: deque[Order] = deque([Order(Phase.PREFILL, 1)] * (self.late + 1))
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        self._jobs[job.key] = job
        self.waiting.append(Waiting(job))

    def step(self) -> None:
        if len(self._under_way) == self.shape.stages:
            self._returned(self._under_way.popleft())
        order = in_effect(self._orders[0], live=len(self.written), prefilling=0, waiting=len(self.waiting))
        batch, blocked = self._prefill(order) if order.phase is Phase.PREFILL else (self._decode(), False)
        self._under_way.append(batch)
        if batch:
            self.kinds.append(order.phase)
        self._orders.append(self.controller.decide(self._sight(len(batch), blocked)))
        self._orders.popleft()

    def _sight(self, scheduled: int, blocked: bool) -> Sight:
        return Sight(
            waiting=tuple(self.waiting)[:32],
            waiting_count=len(self.waiting),
            live=len(self.written),
            context=self._held(),
            scheduled=scheduled,
            blocked=blocked,
        )

    def _held(self) -> int:
        return sum(self._jobs[key].prompt_tokens + count for key, count in self.written.items())

    def _prefill(self, order: Order) -> tuple[list[str], bool]:
        batch, tokens, had = list[str](), 0, bool(self.waiting)
        room = self.shape.blocks * self.shape.block_tokens - self._held()
        while self.waiting and len(batch) < order.admit and len(self.written) < self.shape.seats:
            tokens += self.waiting[0].tokens
            if tokens > min(room, self.shape.step_tokens):
                break
            job = self.waiting.popleft().job
            self.controller.answers.began(job)
            self.written[job.key] = 0
            batch.append(job.key)
        return batch, had and not batch

    def _decode(self) -> list[str]:
        size = self.controller.batch(len(self.ready), len(self.written))
        batch, self.ready = self.ready[:size], self.ready[size:]
        return batch

    def _returned(self, batch: list[str]) -> None:
        for key in batch:
            self.written[key] += 1
            self.controller.answers.wrote(key, self.written[key])
            if self.written[key] >= self.lengths[key]:
                self.controller.answers.ended(key, self.written.pop(key), by_limit=False)
                self.finished.append(key)
            else:
                self.ready.append(key)
        self.most_tokens = max(self.most_tokens, self._held())

    def run(self, most_steps: int) -> None:
        for _ in range(most_steps):
            if not self.waiting and not self.written:
                return
            self.step()
        raise AssertionError(f"{len(self.waiting)} wait and {len(self.written)} run after {most_steps} steps")


def engine(count: int, *, late: int = 0, controller: Controller | None = None, mean: int = 60, seed: int = 1) -> Engine:
    rng = random.Random(seed)
    jobs = [Job(f"r{number}", rng.randint(20, 200), 400) for number in range(count)]
    lengths = {job.key: max(1, min(400, round(rng.expovariate(1 / mean)))) for job in jobs}
    made = Engine(controller or Controller(SHAPE, STEPS), SHAPE, lengths, late)
    for job in jobs:
        made.add(job)
    return made


@pytest.mark.parametrize("late", [0, 1, 3, 17])
def test_every_request_finishes_however_late_orders_are(late: int) -> None:
    ran = engine(200, late=late)
    ran.run(20_000)
    assert sorted(ran.finished) == sorted(ran.lengths)
    assert len(ran.controller.answers) == 0
    assert ran.controller.answers.peak_blocks == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 200), st.integers(0, 1000), st.booleans(), st.booleans())
def test_any_mix_finishes_with_any_methods(
    count: int, late: int, mean: int, seed: int, greedy: bool, intensity: bool
) -> None:
    controller = Controller(SHAPE, STEPS, rule=EAGER, methods=Methods(greedy=greedy, intensity=intensity))
    ran = engine(count, late=late, controller=controller, mean=mean, seed=seed)
    ran.run(30_000)
    assert sorted(ran.finished) == sorted(ran.lengths)


def test_phases_are_long_and_each_step_is_of_one_kind() -> None:
    ran = engine(200)
    ran.run(20_000)
    switches = sum(one is not other for one, other in pairwise(ran.kinds))
    assert switches < len(ran.kinds) / 20
    assert ran.controller.switches >= switches


def test_without_a_least_phase_it_thrashes() -> None:
    calm, hasty = (
        engine(200),
        engine(200, controller=Controller(SHAPE, STEPS, rule=EAGER, methods=Methods(intensity=False))),
    )
    calm.run(20_000)
    hasty.run(20_000)
    assert hasty.controller.switches > 2 * calm.controller.switches


def test_what_is_predicted_to_fit_fits() -> None:
    """With exact lengths no step ever needs more memory than there is."""

    class Known(AnswerLengths):
        def left(self, job: Job, written: int) -> int:
            return max(lengths[job.key] - written, 1)

        def outlook(self, job: Job, written: int) -> Outlook:
            return until(self.left(job, written))

    lengths: dict[str, int] = {}
    ran = engine(200, controller=Controller(SHAPE, STEPS, lengths=Known()), mean=150)
    lengths.update(ran.lengths)
    ran.run(50_000)
    assert 0.6 * SHAPE.blocks * SHAPE.block_tokens < ran.most_tokens <= SHAPE.blocks * SHAPE.block_tokens


def waiting(count: int, tokens: int = 100) -> tuple[Waiting, ...]:
    return tuple(Waiting(Job(f"w{number}", tokens, 100)) for number in range(count))


def test_a_request_larger_than_predicted_memory_begins_alone() -> None:
    """Its answer may be shorter than expected; a queue behind a request that never begins would stand still."""
    controller = Controller(SHAPE, STEPS)
    large = Waiting(Job("large", SHAPE.blocks * SHAPE.block_tokens - 5, 400))
    assert controller.decide(Sight(waiting=(large,), waiting_count=1)).admit == 1


def test_a_prefill_step_that_finds_no_memory_ends_the_phase() -> None:
    controller = Controller(SHAPE, STEPS)
    order = controller.decide(Sight(waiting=waiting(3), waiting_count=3, live=5, context=500, blocked=True))
    assert order.phase is Phase.DECODE
    assert order.reason == "the next prompt has no memory"


def test_seats_bound_what_begins() -> None:
    controller = Controller(SHAPE, STEPS)
    order = controller.decide(Sight(waiting=waiting(9), waiting_count=9, live=60, context=60))
    assert order == Order(Phase.PREFILL, 4, "what waits fits")


def test_decode_is_asked_about_once_a_round() -> None:
    controller = Controller(SHAPE, STEPS, rule=EAGER, methods=Methods(intensity=False))
    assert controller.decide(Sight(live=8, context=800)).phase is Phase.DECODE
    sight = Sight(waiting=waiting(9), waiting_count=9, live=8, context=800, scheduled=2)
    phases = [controller.decide(sight).phase for _ in range(4)]
    assert phases == [Phase.DECODE] * 3 + [Phase.PREFILL]


@pytest.mark.parametrize("last", [1, 10])
def test_decode_gives_way_where_it_measurably_slows_down_also_where_the_step_model_sees_no_loss(
    monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """A model without a part that every step takes says that small batches are as good as large ones."""
    monkeypatch.setattr(Controller, "steps", Coefficients(0.0, 0.0002, 0.0, 0.002, 0.0))
    controller = Controller(SHAPE, STEPS)
    assert controller.decide(Sight(live=40, context=4000)).phase is Phase.DECODE
    window = SwitchRule().least_rounds * SHAPE.stages
    for batch in [10] * window + [last] * window:
        controller.learn(StepSample(0.05, decode_sequences=batch, decode_context=100 * batch))
    sight = Sight(waiting=waiting(90), waiting_count=90, live=4 * last, context=400 * last, scheduled=last)
    phases = {controller.decide(sight).phase for _ in range(window)}
    assert (Phase.PREFILL in phases) is (last == 1)


@pytest.mark.parametrize(
    ("order", "facts", "phase"),
    [
        (Order(Phase.DECODE), {"live": 0, "prefilling": 0, "waiting": 3}, Phase.PREFILL),
        (Order(Phase.DECODE), {"live": 0, "prefilling": 1, "waiting": 0}, Phase.PREFILL),
        (Order(Phase.DECODE), {"live": 1, "prefilling": 1, "waiting": 3}, Phase.DECODE),
        (Order(Phase.PREFILL, 2), {"live": 5, "prefilling": 0, "waiting": 0}, Phase.DECODE),
        (Order(Phase.PREFILL, 0), {"live": 5, "prefilling": 0, "waiting": 3}, Phase.DECODE),
        (Order(Phase.PREFILL, 0), {"live": 5, "prefilling": 1, "waiting": 3}, Phase.PREFILL),
        (Order(Phase.PREFILL, 2), {"live": 0, "prefilling": 0, "waiting": 0}, Phase.PREFILL),
    ],
)
def test_an_order_that_would_leave_the_engine_idle_counts_for_nothing(
    order: Order, facts: dict[str, int], phase: Phase
) -> None:
    assert in_effect(order, **facts).phase is phase


def test_a_prediction_is_corrected_at_points_and_where_it_has_run_out() -> None:
    class Counted(AnswerLengths):
        def left(self, job: Job, written: int) -> int:
            asked.append(written)
            return 40

    asked: list[int] = []
    answers = LiveAnswers(Counted(), block_tokens=16)
    answers.began(Job("a", 100, 400))
    for written in range(1, 80):
        answers.wrote("a", written)
    assert asked == [0, 32, 64]
    answers.gone("a")
    answers.wrote("a", 96)
    answers.ended("a", 96, by_limit=False)
    assert len(answers) == answers.peak_blocks == 0
