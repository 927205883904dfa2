"""The two state machines of a handoff, each alone: what is illegal or late, and every order of events."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.blocks import blocks_for
from transfer.handoff import (
    Broken,
    IllegalEvent,
    Received,
    Receiver,
    ReceiverState,
    Released,
    SendCancel,
    SendFailed,
    SendLanded,
    Write,
    Writer,
    WriterEffect,
    WriterState,
)

LAYERS, BLOCK = 2, 4


def test_the_receiver_needs_the_blocks_and_the_token_in_either_order() -> None:
    first = Receiver()
    assert first.landed() == []
    assert first.first_token(7) == [Received(7)]
    second = Receiver()
    assert second.first_token(7) == []
    assert second.landed() == [Received(7)]
    assert Receiver(needs_token=False).landed() == [Received(None)]


def test_a_cancelled_receiver_waits_for_the_peers_answer() -> None:
    for answer, expected in (
        (Receiver.landed, "aborted"),
        (lambda machine: machine.failed("stopped"), "aborted"),
        (Receiver.peer_lost, "aborted"),
    ):
        receiver = Receiver()
        assert receiver.cancel("aborted") == [SendCancel()]
        assert receiver.first_token(7) == []
        assert receiver.state is ReceiverState.FENCING
        assert answer(receiver) == [Broken(expected)]


def test_a_receiver_that_asks_again_sends_again_as_the_answer_may_be_lost() -> None:
    receiver = Receiver()
    receiver.cancel("aborted")
    assert receiver.cancel("out of time") == [SendCancel()]
    assert receiver.failed("stopped") == [Broken("aborted")]


def test_a_receiver_with_every_block_has_nothing_to_fence() -> None:
    receiver = Receiver()
    receiver.landed()
    assert receiver.cancel("aborted") == [Broken("aborted")]


def test_a_receiver_that_is_done_ignores_the_late() -> None:
    receiver = Receiver(needs_token=False)
    receiver.landed()
    before = copy.deepcopy(receiver)
    for event in (
        receiver.landed,
        receiver.peer_lost,
        lambda: receiver.failed("late"),
        lambda: receiver.cancel("late"),
        lambda: receiver.first_token(9),
    ):
        assert event() == []
    assert receiver == before


def writer() -> Writer:
    return Writer(LAYERS, BLOCK)


@pytest.mark.parametrize(
    ("prepare", "event"),
    [
        (lambda w: w.ended(True), lambda w: w.saved(0, 4, 4, [1])),
        (lambda w: w.ended(True), lambda w: w.ended(True)),
        (lambda w: w.ended(False), lambda w: w.ended(True)),
        (lambda w: w.ended(True), lambda w: w.preempted()),
        (lambda w: None, lambda w: w.write_done(True)),
        (lambda w: w.stop("over"), lambda w: w.write_done(False)),
    ],
)
def test_an_illegal_event_raises_and_changes_nothing(
    prepare: Callable[[Writer], object], event: Callable[[Writer], object]
) -> None:
    machine = writer()
    prepare(machine)
    before = copy.deepcopy(machine)
    with pytest.raises(IllegalEvent):
        event(machine)
    assert machine == before


def test_blocks_go_as_soon_as_they_are_final() -> None:
    machine = writer()
    machine.offered(0, [10, 11])
    assert machine.saved(0, 3, 6, [1, 2]) == []
    assert machine.saved(0, 5, 6, [1, 2]) == [Write(0, (1,), (10,))]
    assert machine.saved(0, 6, 6, [1, 2]) == [Write(0, (2,), (11,))]


def test_what_was_computed_before_the_offer_goes_with_it() -> None:
    machine = writer()
    machine.saved(0, 6, 6, [1, 2])
    machine.saved(1, 4, 6, [1, 2])
    assert machine.offered(0, [10, 11]) == [Write(0, (1, 2), (10, 11)), Write(1, (1,), (10,))]


def test_cached_blocks_of_decode_are_not_written() -> None:
    machine = writer()
    machine.offered(1, [11])
    assert machine.saved(0, 8, 8, [1, 2]) == [Write(0, (2,), (11,))]


def test_too_few_offered_blocks_fail_once_and_write_nothing_after() -> None:
    machine = writer()
    machine.saved(0, 8, 8, [1, 2])
    machine.saved(1, 4, 8, [1, 2])
    assert machine.offered(0, [10]) == [SendFailed("decode offered too few blocks")]
    assert machine.state is WriterState.FAILED


def test_a_preempted_prefill_offers_no_blocks_that_are_no_longer_its_own() -> None:
    machine = writer()
    machine.saved(0, 4, 8, [1, 2])
    machine.preempted()
    assert machine.offered(0, [10, 11]) == []
    assert machine.saved(0, 4, 8, [5, 6]) == [Write(0, (5,), (10,))]


def test_a_preempted_prefill_writes_no_block_twice() -> None:
    machine = writer()
    machine.offered(0, [10, 11])
    assert machine.saved(0, 4, 8, [1, 2]) == [Write(0, (1,), (10,))]
    machine.write_done(True)
    machine.preempted()
    assert machine.saved(0, 4, 8, [5, 6]) == []
    assert machine.saved(0, 8, 8, [5, 6]) == [Write(0, (6,), (11,))]


class WriterOrders(RuleBasedStateMachine):
    """Every legal order of a writer's events. `chunks` are computed layer by layer, as an engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = writer()
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
