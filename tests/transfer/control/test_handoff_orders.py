"""Every legal order of a writer's events gives exactly one of landed and failed, and exactly one release."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.control.handoff import Released, SendFailed, SendLanded, Write, Writer, WriterEffect
from transfer.memory.blocks import blocks_for

LAYERS, BLOCK = 2, 4


class WriterOrders(RuleBasedStateMachine):
    """Every legal order of a writer's events. `chunks` are computed layer by layer, as an engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Writer(range(LAYERS), BLOCK)
        self.first = self.layer = self.computed = 0
        self.prompt = 10
        self.blocks = blocks_for(self.prompt, BLOCK)
        self.local = list(range(self.blocks))
        self.next_local = self.blocks
        self.chunk = 0
        self.has_ended = False
        self.landed = self.failed = self.released = 0
        self.open: list[Write] = []
        self.done: list[Write] = []

    def take(self, effects: list[WriterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Write):
                assert not self.landed
                assert not self.failed, "a write after decode was told that there are none"
                assert set(effect.local) <= set(self.local), "reads blocks that are not its own"
                self.open.append(effect)
                continue
            assert not self.machine.in_flight
            self.landed += isinstance(effect, SendLanded)
            self.failed += isinstance(effect, SendFailed)
            self.released += isinstance(effect, Released)

    @rule(first=st.integers(0, 2), missing=st.sampled_from([0, 0, 0, 1]))
    def offer(self, first: int, missing: int) -> None:
        if self.machine.remote is None:
            self.first = first
        self.take(self.machine.offered(first, range(100 + first, 100 + self.blocks - missing)))

    @precondition(lambda self: not self.has_ended and self.computed < self.prompt)
    @rule(tokens=st.integers(1, 10))
    def save(self, tokens: int) -> None:
        if self.layer == 0:
            self.chunk = min(self.computed + tokens, self.prompt)
        self.take(self.machine.saved(self.layer, self.chunk, self.prompt, self.local))
        self.layer = (self.layer + 1) % LAYERS
        if self.layer == 0:
            self.computed = self.chunk

    @precondition(lambda self: not self.has_ended and self.layer == 0 and not self.open)
    @rule()
    def preempt(self) -> None:
        self.machine.preempted()
        self.local = list(range(self.next_local, self.next_local + self.blocks))
        self.next_local += self.blocks
        self.computed = 0

    @precondition(lambda self: self.open)
    @rule(ok=st.sampled_from([True, True, True, False]), which=st.integers(0, 99))
    def complete(self, ok: bool, which: int) -> None:
        self.done.append(self.open.pop(which % len(self.open)))
        self.take(self.machine.write_done(ok))

    @precondition(lambda self: not self.has_ended and self.layer == 0)
    @rule()
    def end(self) -> None:
        self.has_ended = True
        self.take(self.machine.ended(self.computed >= self.prompt))

    @rule()
    def stop(self) -> None:
        self.take(self.machine.stop("decode cancelled"))

    @invariant()
    def one_outcome(self) -> None:
        assert self.landed <= 1
        assert not (self.landed and self.failed)
        assert self.released <= self.has_ended
        assert not (self.released and self.open)

    @invariant()
    def landed_means_every_block_once(self) -> None:
        if self.landed:
            written = sorted((w.layer, block) for w in self.done for block in w.remote)
            blocks = range(100 + self.first, 100 + self.blocks)
            assert written == [(layer, block) for layer in range(LAYERS) for block in blocks]

    def teardown(self) -> None:
        """However it went, a stop and an end bring it to exactly one outcome and one release."""
        while self.open:
            self.complete(True, 0)
        self.take(self.machine.stop("decode is gone"))
        if not self.has_ended:
            self.has_ended = True
            self.take(self.machine.ended(self.computed >= self.prompt))
        assert bool(self.landed) != bool(self.failed)
        assert self.released == 1
        self.one_outcome()


TestWriterOrders = WriterOrders.TestCase
TestWriterOrders.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
