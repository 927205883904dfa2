"""Both machines of a handoff together, with messages under way: decode blocks are never free too early."""

from __future__ import annotations

import copy
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.control.handoff import (
    Broken,
    Received,
    Receiver,
    ReceiverEffect,
    ReceiverState,
    SendCancel,
    SendFailed,
    SendLanded,
    Write,
    Writer,
    WriterEffect,
)

LAYERS, BLOCK, PROMPT, TOKEN = 2, 4, 8, 42


class Pair(RuleBasedStateMachine):
    """One handoff of two workers. Messages of a connection stay in order; the first token has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.receiver = Writer(range(LAYERS), BLOCK), Receiver()
        self.to_prefill: deque[str] = deque(["offer"])
        self.to_decode: deque[SendLanded | SendFailed] = deque()
        self.saves = [(layer, computed) for computed in (5, PROMPT) for layer in range(LAYERS)]
        self.in_flight = 0
        self.token_sent = self.has_ended = self.is_dead = False
        self.results: list[Received | Broken] = []

    def writes(self, effects: list[WriterEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Write):
                self.in_flight += 1
            elif isinstance(effect, SendLanded | SendFailed) and "offer" not in self.to_prefill:
                self.to_decode.append(effect)

    def receives(self, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendCancel):
                self.to_prefill.append("cancel")
            else:
                self.results.append(effect)

    @precondition(lambda self: self.to_prefill and not self.is_dead)
    @rule()
    def prefill_hears(self) -> None:
        if self.to_prefill.popleft() == "offer":
            self.writes(self.writer.offered(0, [10, 11]))
        else:
            self.writes(self.writer.stop("decode cancelled"))

    @precondition(lambda self: self.to_decode and not self.is_dead)
    @rule(is_lost=st.sampled_from([False, False, False, True]))
    def decode_hears(self, is_lost: bool) -> None:
        answer = self.to_decode.popleft()
        if not is_lost:
            landed = isinstance(answer, SendLanded)
            self.receives(self.receiver.landed() if landed else self.receiver.failed("stopped"))

    @precondition(lambda self: self.saves and not self.has_ended and not self.is_dead)
    @rule()
    def compute(self) -> None:
        layer, computed = self.saves.pop(0)
        self.writes(self.writer.saved(layer, computed, PROMPT, [1, 2]))

    @precondition(lambda self: self.in_flight and not self.is_dead)
    @rule(ok=st.sampled_from([True, True, True, False]))
    def write_completes(self, ok: bool) -> None:
        self.in_flight -= 1
        self.writes(self.writer.write_done(ok))

    @precondition(lambda self: not self.has_ended and not self.is_dead)
    @rule()
    def prefill_ends(self) -> None:
        self.has_ended = True
        self.writes(self.writer.ended(not self.saves))

    @precondition(lambda self: not self.token_sent and not self.saves)
    @rule()
    def token_arrives(self) -> None:
        self.token_sent = True
        self.receives(self.receiver.first_token(TOKEN))

    @rule()
    def decode_cancels(self) -> None:
        self.receives(self.receiver.cancel("aborted"))

    @rule()
    def prefill_times_out(self) -> None:
        if not self.is_dead:
            self.writes(self.writer.stop("out of time"))

    @precondition(lambda self: not self.is_dead)
    @rule()
    def prefill_dies(self) -> None:
        self.is_dead, self.in_flight = True, 0
        self.receives(self.receiver.peer_lost())

    @invariant()
    def free_means_that_nothing_writes(self) -> None:
        assert len(self.results) <= 1
        assert bool(self.results) == (self.receiver.state is ReceiverState.DONE)
        if self.results and not self.is_dead:
            assert not self.in_flight
            future = copy.deepcopy(self.writer)
            effects = future.offered(0, [10, 11]) if "offer" in self.to_prefill else []
            for layer in range(LAYERS if not self.has_ended else 0):
                effects += future.saved(layer, PROMPT, PROMPT, [1, 2])
            assert not [effect for effect in effects if isinstance(effect, Write)]

    @invariant()
    def received_means_all_of_it(self) -> None:
        if self.results and isinstance(self.results[0], Received):
            assert not self.saves
            assert self.results[0].token == TOKEN

    def teardown(self) -> None:
        """A repeated cancel ends every handoff whose prefill lives or is known to be dead."""
        for _ in range(2):
            if not self.has_ended and not self.is_dead:
                self.prefill_ends()
            self.decode_cancels()
            while self.in_flight:
                self.write_completes(True)
            while self.to_prefill and not self.is_dead:
                self.prefill_hears()
            while self.to_decode:
                self.decode_hears(False)
        if not self.results and self.writer.over:  # the channel's tombstone answers in the writer's place
            self.receives(self.receiver.failed("the handoff is over"))
        assert len(self.results) == 1


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
