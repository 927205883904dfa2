"""One simulated engine: continuous batching with a token budget, chunked prefill, paged memory, a prefix cache.

It follows vLLM's V1. While it only decodes, it computes in closed form the time until the next change of its batch
(`Span`). A step that prefills is one event. The engine looks at arrivals when the current step ends, as a real engine
does.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable

from deployments.messages import ReplicaInfo
from deployments.policy.step_size import LOOKED_AT, share_of_one
from deployments.step_cost import Coefficients
from load_tests.simulator.decoding import DecodeBatch
from load_tests.simulator.memory import BlockMemory
from load_tests.simulator.steps import Chunk, Happened, Limits, Log, Pace, Step
from load_tests.simulator.work import Work


class Replica:
    """One engine. `boundary_s`: when `boundary` is to be called next; None: not before something arrives.

    `bring`: asked once a prompt has its blocks. True: a part of it comes from elsewhere, and `brought` is called then.
    """

    def __init__(
        self,
        info: ReplicaInfo,
        coefficients: Coefficients,
        limits: Limits,
        rng: random.Random,
        speed: float = 1.0,
        tier_blocks: int = 0,
    ) -> None:
        self.info = info
        self.memory = BlockMemory(info.total_blocks, info.block_size, tier_blocks)
        self.batch = DecodeBatch(info.block_size)
        self.boundary_s: float | None = None
        self.preemptions = 0
        self.backlog_tokens = 0
        self.sessions: dict[str, Work] = {}
        self.bring: Callable[[Work], bool] = lambda work: False
        self.log = Log()
        self.waiting: deque[Work] = deque()
        self.prefilling: list[Work] = []
        self._ready: deque[Work] = deque()
        self._brought: deque[Work] = deque()
        self._leaving: list[Work] = []
        self._coming: dict[str, Work] = {}  # offered, and their KV is not here yet
        self._limits, self._pace = limits, Pace(coefficients, limits, rng, speed)
        self._step: Step | None = None

    @property
    def seats_taken(self) -> int:
        """The number of sequences that run: those that decode and those that prefill."""
        return len(self.batch) + len(self.prefilling)

    def expect(self, work: Work) -> None:
        """Note a sequence that will be submitted later: its call is here, and waits for decode's offer."""
        self.sessions[work.session_id] = work

    def submit(self, work: Work, now_s: float) -> None:
        """Add a sequence to serve."""
        self.sessions[work.session_id] = work
        self.waiting.append(work)
        if not work.loads:
            self.backlog_tokens += work.target
        self._interrupt(now_s)

    def land(self, work: Work, now_s: float) -> None:
        """The KV and the first token of an offered sequence are here."""
        self.memory.commit(work, work.target)
        del self._coming[work.session_id]
        work.generated = 1
        if work.outputs == 1:
            self._end(work)
        else:
            self._ready.append(work)
        self._interrupt(now_s)

    def brought(self, work: Work, tokens: int, now_s: float) -> None:
        """The first `tokens` tokens of a prompt are here; what it has of them by its own cache is among them."""
        self.backlog_tokens -= max(tokens - work.computed, 0)
        work.cached_tokens = work.computed = max(tokens, work.computed)
        self.memory.commit(work, work.computed)
        self._brought.append(work)
        self._interrupt(now_s)

    def give_up(self, session_id: str, now_s: float) -> None:
        """A session moves to another replica when the current step is over, if it decodes then."""
        if (work := self.sessions.get(session_id)) is not None and work in self.batch:
            self._leaving.append(work)
            self._interrupt(now_s)

    def release(self, work: Work, now_s: float) -> None:
        """The blocks that an ended sequence kept are no longer read: free them."""
        self.memory.release(work, self.memory.blocks_for(work.context if work.is_given_up else work.target))
        self.sessions.pop(work.session_id, None)
        if self.waiting:
            self._interrupt(now_s)

    def decoded_now(self, now_s: float) -> tuple[int, int]:
        """The decode steps that are done but not in `batch` yet, and the blocks that they took."""
        step = self._step
        if step is None or step.chunks:
            return 0, 0
        steps = min(step.span.steps_ended((now_s - step.begun_s) / step.factor), step.steps)
        return steps, self.batch.growth(steps)

    def boundary(self, now_s: float) -> Happened:
        """The current step or span is over: take its results, and begin the next."""
        happened = Happened()
        if self._step is not None:
            self._complete(self._step, happened)
        self._give_up(happened)
        while self._ready and self.seats_taken < self._limits.sequences:
            self.batch.join(self._ready.popleft())
        while self._brought and self.seats_taken < self._limits.sequences:
            self.prefilling.append(self._brought.popleft())
        put_off = self._make_room() and self.seats_taken > 0
        if not put_off:
            self._admit(happened)
        self._step = self._plan(now_s, 1 if put_off else self._limits.span_steps)
        self.boundary_s = None
        if self._step is not None:
            self.boundary_s = now_s + self._step.factor * self._step.span.seconds(self._step.steps)
        return happened

    def _interrupt(self, now_s: float) -> None:
        """Something arrived. Look at it when the current decode step ends, or now when there is none."""
        step = self._step
        if step is None:
            self.boundary_s = now_s
        elif step.steps > 1:
            elapsed_s = (now_s - step.begun_s) / step.factor
            ended = step.span.steps_ended(elapsed_s)
            step.steps = min(step.steps, max(1, ended if step.span.seconds(ended) == elapsed_s else ended + 1))
            self.boundary_s = step.begun_s + step.factor * step.span.seconds(step.steps)

    def _complete(self, step: Step, happened: Happened) -> None:
        self.log.sample(step, self.batch)
        if len(self.batch):
            self.memory.grow(self.batch.growth(step.steps))
            for work in self.batch.advance(step.steps):
                self._end(work)
                happened.ended.append(work)
        for work, tokens in step.chunks:
            self._computed(work, tokens, step.begun_s, happened)

    def _give_up(self, happened: Happened) -> None:
        for work in self._leaving:
            if work in self.batch:
                self.batch.drop(work)
                self.memory.commit(work, work.context)
                work.is_given_up = True
                happened.given_up.append(work)
                self.log.end(work)
        self._leaving.clear()

    def _computed(self, work: Work, tokens: int, begun_s: float, happened: Happened) -> None:
        """A chunk of a prompt is computed. After the last chunk the sequence has one more token."""
        begin = work.computed if work.is_offered else 0
        work.is_offered = True  # its cached part goes out with the first chunk
        work.computed += tokens
        self.backlog_tokens -= tokens
        self.memory.commit(work, work.computed)
        if work.keeps:
            happened.chunks.append(Chunk(work, begin, work.computed, begun_s))
        if work.computed < work.target:
            return
        self.prefilling.remove(work)
        work.generated += 1
        happened.first.append(work)
        if work.generated < work.outputs:
            self.batch.join(work)
            return
        happened.ended.append(work)
        if work.keeps:
            self.log.end(work)
        else:
            self._end(work)

    def _end(self, work: Work) -> None:
        self.memory.commit(work, work.context)
        self.memory.release(work, self.memory.blocks_for(work.context))
        self.sessions.pop(work.session_id, None)
        self.log.end(work)

    def _make_room(self) -> bool:
        """Free blocks for the next decode step.

        While too few are free, the newest sequence starts over. Returns whether any did.
        """
        preempted = False
        while len(self.batch) and self.batch.growth(1) > self.memory.total - self.memory.used:
            work = self.batch.drop_newest()
            self.memory.release(work, self.memory.blocks_for(work.context))
            work.target = work.prompt_tokens + work.generated
            work.computed = 0
            self.backlog_tokens += work.target
            work.loads = False
            self.waiting.appendleft(work)
            self.preemptions += 1
            preempted = True
        return preempted

    def _admit(self, happened: Happened) -> None:
        """Admit waiting sequences, in order, while seats, tokens and blocks last."""
        reserve = self.batch.growth(1)
        budget, most = self._budget()
        budget -= sum(min(most, work.target - work.computed) for work in self.prefilling)
        while self.waiting:
            work = self.waiting[0]
            if not work.loads and (budget <= 0 or self.seats_taken >= self._limits.sequences):
                return
            if not self.memory.allocate(work, work.target, reserve):
                return
            self.waiting.popleft()
            if work.loads:
                work.is_offered = True
                self._coming[work.session_id] = work
                happened.offered.append(work)
                continue
            work.computed = work.cached_tokens
            self.backlog_tokens -= work.cached_tokens
            if self.bring(work):
                continue
            self.prefilling.append(work)
            budget -= min(most, work.target - work.computed)

    def _plan(self, now_s: float, most_steps: int) -> Step | None:
        if not self.seats_taken:
            return None
        chunks, context = self._chunks()
        steps = 1
        if not chunks:
            steps = min(self.batch.steps_left(), most_steps)
            steps = self.batch.steps_within(self.memory.total - self.memory.used, steps)
        return self._pace.step(now_s, self.batch, steps, chunks, context)

    def _budget(self) -> tuple[int, int]:
        """The most prompt tokens of the next step, and of one sequence in it."""
        waiting = (work for work in itertools.islice(self.waiting, LOOKED_AT) if not work.loads)
        left = [work.target - work.computed for work in (*self.prefilling, *waiting)]
        begun = self.prefilling[0].computed if self.prefilling else 0
        budget = self._pace.prompt_budget(self.batch, self._coming.values(), begun)
        return budget, share_of_one(budget, left)

    def _chunks(self) -> tuple[list[tuple[Work, int]], int]:
        """The prompt tokens of the next step, oldest sequences first, and the sum of the tokens before each."""
        budget, most = self._budget()
        chunks: list[tuple[Work, int]] = []
        context = 0
        for work in self.prefilling:
            tokens = min(budget, most, work.target - work.computed)
            if tokens <= 0:
                break
            chunks.append((work, tokens))
            context += tokens * work.computed + tokens * (tokens - 1) // 2
            budget -= tokens
        return chunks, context
