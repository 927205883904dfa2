"""The mock engine's scheduler: continuous batching, chunked prefill and paged KV blocks. Pure bookkeeping.

Requests wait in order of arrival. A decode request of a handoff gets its blocks, and waits apart from the
running requests until its KV is there. A request that is over may still hold its blocks, because a peer reads
or writes them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from configs.schema import MockEngineConfig
from deployments.engine.mock.pinned import PinnedBlocks
from deployments.engine.mock.sequence import Sequence
from deployments.messages import StepSample
from deployments.policy.step_size import prompt_budget, share_of_one
from deployments.step_cost import Coefficients
from transfer.memory.blocks import blocks_for


@dataclass(slots=True)
class Plan:
    """One step: the number of tokens to compute by sequence, and what the worker must do before.

    `offers`: sequences whose blocks go to prefill as offers. `preempted`: sequences that lost their blocks. `fresh`:
    newly allocated blocks.
    """

    work: list[tuple[Sequence, int]] = field(default_factory=list)
    offers: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)

    def sample(self, seconds: float) -> StepSample:
        """The sample of this step. Call it before anything of the step is computed.

        A preempted sequence counts as prefill again.
        """
        prefill = [(s.computed, count) for s, count in self.work if count > 1 or s.computed < s.prompt_tokens]
        decode = [s.computed + 1 for s, count in self.work if count == 1 and s.computed >= s.prompt_tokens]
        return StepSample(
            seconds,
            prefill_tokens=sum(count for _, count in prefill),
            prefill_context=sum(count * before + count * (count - 1) // 2 for before, count in prefill),
            decode_sequences=len(decode),
            decode_context=sum(decode),
        )


def steps_of(config: MockEngineConfig) -> Coefficients:
    """What the steps of a mock engine take."""
    return Coefficients(config.step_s, 1 / config.prefill_tokens_per_s, 0.0, config.sequence_s, 0.0)


class MockScheduler:
    """Owns every sequence and every block of one mock engine. `prompt_share`: as in the configuration."""

    def __init__(self, config: MockEngineConfig, prompt_share: float) -> None:
        self._config, self._prompt_share = config, prompt_share
        self._free = deque(range(config.num_blocks))
        self._sequences: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.loading: dict[str, Sequence] = {}
        self.sending: dict[str, Sequence] = {}
        self.preemptions = 0
        self.pinned = PinnedBlocks(config.block_size)

    @property
    def used_blocks(self) -> int:
        return self._config.num_blocks - len(self._free)

    @property
    def has_handoffs(self) -> bool:
        """Whether a handoff is open, so that the channel will report its end."""
        return bool(self.loading or self.sending)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self.waiting.append(sequence)
        self._free.extend(self.pinned.begin(sequence))

    def abort(self, request_id: str) -> Sequence | None:
        """Remove a request. None when it is not here.

        Blocks that a peer may still read or write are freed later: by `release`, `loaded` or `not_loaded`.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        sequence.is_over = True
        if request_id not in self.loading:
            self.finish(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """A request is over. Its blocks are freed, or are kept while its KV is being sent."""
        sequence.is_over = True
        self._sequences.pop(sequence.request_id, None)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.sends:
            self.sending[sequence.request_id] = sequence
        else:
            self._free.extend(self.pinned.finished(sequence))
            self._give_back(sequence)

    def loaded(self, request_id: str) -> Sequence:
        """A handoff's KV is here. The request is next in the queue. If it is over, its blocks are freed."""
        sequence = self.loading.pop(request_id)
        sequence.has_loaded = True
        if sequence.is_over:
            self._give_back(sequence)
        else:
            self.waiting.appendleft(sequence)
        return sequence

    def not_loaded(self, request_id: str) -> Sequence:
        """A handoff is over without its KV. The request is removed, and its blocks are freed."""
        sequence = self.loading.pop(request_id)
        self._sequences.pop(request_id, None)
        self._give_back(sequence)
        return sequence

    def release(self, request_id: str) -> None:
        """No write reads the blocks of a sent request any more."""
        self._give_back(self.sending.pop(request_id))

    def plan(self) -> Plan:
        """Decide the next step: answers first, then prompts, then new requests while tokens, seats and blocks last."""
        plan = Plan()
        self.running.sort(key=lambda sequence: sequence.computed < sequence.prompt_tokens)
        budget, most = self._budget()
        for sequence in list(self.running):
            if budget and sequence not in plan.preempted:
                count = min(budget, most, len(sequence.tokens) - sequence.computed)
                if self._grow(sequence, sequence.computed + count, plan):
                    plan.work.append((sequence, count))
                    budget -= count
        if not plan.preempted:
            self._admit(plan, budget, most)
        return plan

    def _budget(self) -> tuple[int, int]:
        """The most tokens of the next step, and of one prompt in it."""
        answers = [each for each in self.running if each.computed >= each.prompt_tokens]
        prompts = [each for each in (*self.running, *self.waiting) if each.computed < each.prompt_tokens]
        prompts = [each for each in prompts if not each.must_load]
        objectives = {each.request.tpot_s for each in (*answers, *self.loading.values())}
        left = [each.prompt_tokens - each.computed for each in prompts]
        context, begun = sum(each.computed for each in answers), prompts[0].computed if prompts else 0
        steps, whole = steps_of(self._config), self._config.max_num_batched_tokens
        budget = prompt_budget(steps, whole, len(answers), context, begun, objectives, self._prompt_share)
        # A sequence whose KV has just come takes a token, too.
        return min(budget + len(answers) + len(self.waiting), whole), share_of_one(budget, left)

    def _admit(self, plan: Plan, budget: int, most: int) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            seats = self._config.max_num_seqs - len(self.running)
            if not sequence.must_load and not (seats and budget):
                return
            if not self._allocate(sequence, len(sequence.tokens), plan):
                return
            self.waiting.popleft()
            if sequence.must_load:
                self.loading[sequence.request_id] = sequence
                plan.offers.append(sequence)
                continue
            self.running.append(sequence)
            count = min(budget, most, len(sequence.tokens) - sequence.computed)
            plan.work.append((sequence, count))
            budget -= count

    def _grow(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Make room for `tokens` tokens. If blocks are missing, the newest requests are preempted.

        False when this request itself is preempted.
        """
        while not self._allocate(sequence, tokens, plan):
            newest = self.running.pop()
            newest.computed, newest.chain = 0, 0
            self._give_back(newest)
            self.waiting.appendleft(newest)
            plan.preempted.append(newest)
            self.preemptions += 1
            if newest is sequence:
                return False
        return True

    def _allocate(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        missing = blocks_for(tokens, self._config.block_size) - len(sequence.blocks)
        if missing > len(self._free):
            return False
        fresh = [self._free.popleft() for _ in range(missing)]
        sequence.blocks.extend(fresh)
        plan.fresh.extend(fresh)
        return True

    def _give_back(self, sequence: Sequence) -> None:
        self._free.extend(sequence.blocks)
        sequence.blocks = []
