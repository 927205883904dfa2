"""The control plane of an engine that works in phases: it decides phases, admissions and batches. Pure.

TD-Pipe's hierarchical controller (arXiv 2506.10470): the engine plane runs steps and never waits for a decision. It
tells what it sees (`Sight`) once a step is with the workers, and does what the newest order says that it has. An order
may be late by any number of steps. Where it is so old that the engine would stand still, the engine does the other
thing (`in_effect`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from deployments.messages import StepSample
from deployments.policy.prediction.step_time import StepModel
from deployments.policy.temporal.answers import LiveAnswers, Waiting
from deployments.policy.temporal.intensity import DecodeRate, PrefillPhase, SwitchRule, prefill_phase, spatial
from deployments.policy.temporal.lengths import AnswerLengths
from deployments.policy.temporal.stealing import Evening
from deployments.step_cost import Coefficients


class Phase(StrEnum):
    """What the steps of an engine compute for now: prompts alone, or answers alone."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Order:
    """`admit`: how many more requests may begin, in a prefill phase. `reason`: why the phase is what it is."""

    phase: Phase
    admit: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sight:
    """What the engine plane sees. `waiting`: the first that wait, in order. `waiting_count`: all that wait.

    `prefilling`: requests with a part of their prompt yet to schedule. `live`: those behind that, under way or not.
    `context`: the tokens that the live ones hold. `scheduled`: the tokens of the step that is with the workers now.
    `blocked`: a prefill step had something to compute, and computed nothing.
    """

    waiting: tuple[Waiting, ...] = ()
    waiting_count: int = 0
    prefilling: int = 0
    live: int = 0
    context: int = 0
    scheduled: int = 0
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class EngineShape:
    """`stages`: of its pipeline. `step_tokens`: the most of a step. `seats`: requests at once. `blocks`: of KV memory.

    `block_tokens`: the tokens of a block.
    """

    stages: int
    step_tokens: int
    seats: int
    blocks: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Methods:
    """Which of the methods are in use; benchmarks leave some out. `memory_share`: of the blocks that may be expected
    to be held at a future point. Without `greedy`, requests begin while what is held now leaves room for their prompt.
    Without `intensity`, decode gives way as soon as the least prefill phase fits."""

    greedy: bool = True
    stealing: bool = True
    intensity: bool = True
    memory_share: float = 0.95


class Controller:
    """Decides for one engine. `prior`: what steps through all stages take, before any was seen."""

    def __init__(
        self,
        shape: EngineShape,
        prior: Coefficients,
        *,
        rule: SwitchRule | None = None,
        methods: Methods | None = None,
        lengths: AnswerLengths | None = None,
    ) -> None:
        self._shape, self._rule, self._methods = shape, rule or SwitchRule(), methods or Methods()
        self.answers = LiveAnswers(lengths or AnswerLengths(), shape.block_tokens)
        self._evening = Evening(shape.stages)
        self._steps = StepModel(prior, seats=shape.seats // shape.stages)
        self._rate = DecodeRate(self._rule.least_rounds * shape.stages)
        self._phase = Phase.PREFILL
        self._decode_steps = 0
        self.switches = 0

    def learn(self, step: StepSample) -> None:
        """A step of the engine is over."""
        self._steps.observe(step)
        if self._phase is Phase.DECODE and step.decode_sequences and not step.prefill_tokens:
            self._rate.observe(step.decode_sequences, step.seconds)

    @property
    def steps(self) -> Coefficients:
        """What steps through all stages take, as far as is known."""
        return self._steps.coefficients

    def resize(self, step_tokens: int) -> None:
        """From now on a step has so many tokens at most."""
        self._shape = replace(self._shape, step_tokens=step_tokens)

    def batch(self, ready: int, live: int) -> int:
        """How many of the requests that are ready are in the next decode batch."""
        return self._evening.size(ready, live) if self._methods.stealing else ready

    def decide(self, sight: Sight) -> Order:
        """The order for the steps from now on."""
        if self._phase is Phase.PREFILL:
            return self._prefilling(sight)
        self._decode_steps += sight.scheduled > 0
        return self._decoding(sight)

    def _prefilling(self, sight: Sight) -> Order:
        if not sight.live:  # nothing else to do: a request alone may always begin
            begins = self._admitted(sight) or int(sight.waiting_count > 0 and not sight.prefilling)
            return Order(Phase.PREFILL, begins, "nothing decodes")
        if sight.blocked:
            return self._switch(Phase.DECODE, "the next prompt has no memory")
        if begins := self._admitted(sight):
            return Order(Phase.PREFILL, begins, "what waits fits")
        if sight.prefilling:
            return Order(Phase.PREFILL, 0, "begun prompts are completed")
        reason = "the memory to come is taken" if sight.waiting_count else "nothing waits"
        return self._switch(Phase.DECODE, reason)

    def _decoding(self, sight: Sight) -> Order:
        if not sight.live:
            if not sight.waiting_count and not sight.prefilling:
                return Order(Phase.DECODE, 0, "nothing to do")
            self._switch(Phase.PREFILL, "")
            return self._prefilling(sight)
        rounds, rest = divmod(self._decode_steps, self._shape.stages)
        if rest or rounds < self._rule.least_rounds or not (sight.waiting_count or sight.prefilling):
            return Order(Phase.DECODE, 0, "answers go on")
        goes_back, reason = self._goes_back(sight)
        if goes_back:  # predictions are up to 32 tokens old: what is about to be done is looked at closely
            self.answers.refresh()
            goes_back, reason = self._goes_back(sight)
        if not goes_back:
            return Order(Phase.DECODE, 0, reason)
        return replace(self._switch(Phase.PREFILL, reason), admit=self._admitted(sight))

    def _goes_back(self, sight: Sight) -> tuple[bool, str]:
        if sight.prefilling:
            return True, "a prompt is begun"
        phase, steps, stages = self._candidate(sight), self.steps, self._shape.stages
        each = sight.context / sight.live
        batch = sight.live / stages
        decode_s = steps.step_s(0, 0, batch, sight.context / stages)
        modelled = spatial(steps, batch, self._most_live() / stages, each)
        intensity = min(self._rate.left, modelled) if self._methods.intensity else -1.0
        least = self._rule.least_tokens(self._shape.step_tokens, self._shape.blocks * self._shape.block_tokens)
        return self._rule.goes_back(intensity, phase, decode_s, stages, least)

    def _candidate(self, sight: Sight) -> PrefillPhase:
        """The prefill phase that could begin now."""
        count = self._admitted(sight)
        prompts = [each.tokens for each in sight.waiting[:count]]
        return prefill_phase(self.steps, prompts, self._shape.step_tokens, is_all=count == sight.waiting_count)

    def _admitted(self, sight: Sight) -> int:
        """How many of those that wait may begin."""
        seats = max(self._shape.seats - sight.live - sight.prefilling, 0)
        first, blocks = sight.waiting[:seats], self._shape.blocks * self._methods.memory_share
        if self._methods.greedy:
            return self.answers.fitting(first, blocks)
        tokens, count = sight.context, 0
        for each in first:
            tokens += each.tokens + self._shape.block_tokens
            if tokens > blocks * self._shape.block_tokens:
                break
            count += 1
        return count

    def _most_live(self) -> float:
        """The most requests that decode at once: as many as have seats, and memory up to their expected end."""
        each = self.answers.tokens_at_end
        fits = self._shape.blocks * self._shape.block_tokens / each if each else float("inf")
        return min(self._shape.seats, fits)

    def _switch(self, phase: Phase, reason: str) -> Order:
        self._phase, self._decode_steps = phase, 0
        self._rate.begin()
        self.switches += 1
        return Order(phase, 0, reason)


def in_effect(order: Order, *, live: int, prefilling: int, waiting: int) -> Order:
    """What an engine does by an order that may be old: an order that would leave it idle counts for nothing.

    `live`, `prefilling`, `waiting`: requests, as in `Sight`, now.
    """
    if order.phase is Phase.DECODE and not live and (waiting or prefilling):
        return Order(Phase.PREFILL, 1, "nothing decodes any more")
    if order.phase is Phase.PREFILL and live and not prefilling and not (waiting and order.admit):
        return Order(Phase.DECODE, 0, "nothing is left to prefill")
    return order
