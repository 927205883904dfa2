"""Two epochs of one session over a network that delivers in any order, late and more than once. No threads.

In every order, what arrives is right, and memory is not written after its epoch was reported over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from transfer.channel.decode_side import DecodeSide
from transfer.channel.layers import Chunk
from transfer.channel.outbox import Outbox
from transfer.channel.pacing import Limits
from transfer.channel.prefill_side import PrefillSide
from transfer.control import messages as control
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.layout import KVLayout
from transfer.memory.partition import ONE_WORKER
from transfer.memory.plane import WriteState

LAYERS, BLOCKS, BLOCK_BYTES, BLOCK_SIZE, PROMPT, FAR = 2, 16, 8, 4, 10, 1e6
EPOCHS = (1, 2)
SELDOM = st.sampled_from([False, False, False, False, False, True])
WHICH = st.sampled_from([0, 0, 0, 0, 1, 2, 5])  # mostly the oldest
SOURCE, TARGET = {1: [0, 1, 2], 2: [4, 5, 6]}, {1: [9, 8, 10], 2: [3, 2, 1]}


class PatientPlane(InProcessPlane):
    """A write is posted now and done when `finish` is called."""

    def write(self, *arguments: Any) -> Any:
        return [arguments]

    def check(self, handle: Any) -> WriteState:
        return WriteState.BUSY if handle else WriteState.DONE

    def finish(self, handle: Any) -> None:
        super().write(*handle.pop())


class Wire:
    """One side's endpoint. Every connection has an identity of its own; `sent` is under way to the other side."""

    def __init__(self, address: str) -> None:
        self.address, self.sent = address, list[tuple[bytes, control.AnyMessage]]()
        self.connection = 0
        self.is_open = False

    @property
    def peers(self) -> set[str]:
        return {"prefill"} if self.is_open else set()

    def connect(self, address: str) -> bool:
        was_open, self.is_open = self.is_open, True
        self.connection += not was_open
        return not was_open

    def disconnect(self, address: str) -> None:
        self.is_open = False

    def send(self, to: bytes | str, message: control.AnyMessage) -> None:
        identity = to if isinstance(to, bytes) else str(self.connection).encode()
        if not isinstance(message, control.Nudge):  # when one is sent depends on the time, and it changes nothing
            self.sent.append((identity, message))


class Epochs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sides: dict[str, Any] = {}
        self.wires = {name: Wire(name) for name in ("prefill", "decode")}
        self.boxes = {name: Outbox() for name in self.wires}
        self.planes = {name: PatientPlane(f"{name}-{id(self)}") for name in self.wires}
        self.memory = {name: np.zeros((LAYERS, BLOCKS, BLOCK_BYTES), dtype=np.uint8) for name in self.wires}
        generator = np.random.default_rng(1)
        self.memory["prefill"][:] = generator.integers(1, 256, self.memory["prefill"].shape, dtype=np.uint8)
        sides: tuple[tuple[str, Any], ...] = (("prefill", PrefillSide), ("decode", DecodeSide))
        for name, build in sides:
            base = int(self.memory[name].ctypes.data)
            bases = tuple(base + layer * BLOCKS * BLOCK_BYTES for layer in range(LAYERS))
            layout = KVLayout(LAYERS, 1, BLOCKS, BLOCK_SIZE, BLOCK_BYTES, bases)
            self.planes[name].register(layout)
            arguments: list[Any] = [
                self.planes[name],
                layout,
                self.wires[name],
                self.boxes[name],
                FAR,
                lambda *a, **k: None,
            ]
            self.sides[name] = build(*arguments, *([Limits()] if name == "prefill" else []))
        self.now = 0.0
        self.offered: set[int] = set()
        self.computed = dict.fromkeys(EPOCHS, 0)
        self.ended: set[int] = set()
        self.frozen: dict[int, np.ndarray] = {}  # an epoch's decode blocks when it was reported over
        self.results: dict[str, Any] = {}
        self.released: set[str] = set()

    # ---- the engines

    @rule(epoch=st.sampled_from(EPOCHS))
    def offer(self, epoch: int) -> None:
        if epoch not in self.offered:
            self.offered.add(epoch)
            self.sides["decode"].offer(("s", epoch), str(epoch), ["prefill"], 0, TARGET[epoch], False)

    @rule(epoch=st.sampled_from(EPOCHS), really=SELDOM)
    def cancel(self, epoch: int, really: bool) -> None:
        if really:
            self.sides["decode"].cancel(("s", epoch), "aborted")

    @rule(epoch=st.sampled_from(EPOCHS), tokens=st.sampled_from([3, 6, PROMPT]))
    def save(self, epoch: int, tokens: int) -> None:
        if epoch not in self.ended and self.computed[epoch] < PROMPT:
            self.computed[epoch] = min(PROMPT, self.computed[epoch] + tokens)
            chunk = Chunk(("s", epoch), str(epoch), self.computed[epoch], PROMPT, tuple(SOURCE[epoch]))
            for layer in range(LAYERS):
                self.sides["prefill"].saved((chunk,), layer, None)

    @rule(epoch=st.sampled_from(EPOCHS))
    def end(self, epoch: int) -> None:
        if epoch not in self.ended:
            self.ended.add(epoch)
            self.sides["prefill"].ended(("s", epoch), str(epoch), self.computed[epoch] == PROMPT, ONE_WORKER)

    @rule(side=st.sampled_from(["prefill", "decode"]), really=SELDOM)
    def run_out_of_time(self, side: str, really: bool) -> None:
        self.now += 10 * FAR
        if really:
            self.sides[side].expire(self.now)

    # ---- the network and the data plane

    @precondition(lambda self: self.wires["decode"].sent)
    @rule(which=WHICH, again=st.sampled_from([False, False, True]))
    def deliver_to_prefill(self, which: int, again: bool) -> None:
        identity, message = self.pick("decode", which, again)
        side = self.sides["prefill"]
        match message:
            case control.Hello():
                side.hello(identity, message)
            case control.Offer():
                side.offered(identity, message)
            case control.Cancel():
                side.cancelled(identity, message)

    @precondition(lambda self: self.wires["prefill"].sent)
    @rule(which=WHICH, again=st.sampled_from([False, False, True]))
    def deliver_to_decode(self, which: int, again: bool) -> None:
        identity, message = self.pick("prefill", which, again)
        wire, side = self.wires["decode"], self.sides["decode"]
        if not wire.is_open or identity != str(wire.connection).encode():
            return  # its connection is closed
        match message:
            case control.Landed(session, epoch):
                side.landed((session, epoch), "prefill")
            case control.Failed(session, epoch, reason):
                side.failed((session, epoch), reason, "prefill")
            case control.Refused(reason):
                side.refused("prefill", reason)

    @rule()
    def deliver_all_in_order(self) -> None:
        while self.wires["decode"].sent or self.wires["prefill"].sent:
            if self.wires["decode"].sent:
                self.deliver_to_prefill(0, False)
            if self.wires["prefill"].sent:
                self.deliver_to_decode(0, False)

    def pick(self, side: str, which: int, again: bool) -> tuple[bytes, control.AnyMessage]:
        sent = self.wires[side].sent
        return sent[which % len(sent)] if again else sent.pop(which % len(sent))

    @rule(which=WHICH)
    def write(self, which: int) -> None:
        """A write that is under way gets done, not the oldest first."""
        self.sides["prefill"].progress()
        if in_flight := self.sides["prefill"].writes.in_flight:
            _, handle, _ = in_flight[which % len(in_flight)]
            self.planes["prefill"].finish(handle)
            self.sides["prefill"].progress()

    # ---- what must hold

    @invariant()
    def what_is_over_is_not_written(self) -> None:
        taken = self.boxes["decode"].take()
        for name in [*taken.received, *taken.broken]:
            epoch = int(name)
            assert epoch not in self.frozen
            here = self.memory["decode"][:, TARGET[epoch]]
            if name in taken.received:
                assert np.array_equal(here, self.memory["prefill"][:, SOURCE[epoch]])
            self.frozen[epoch] = here.copy()
        for epoch, blocks in self.frozen.items():
            assert np.array_equal(self.memory["decode"][:, TARGET[epoch]], blocks)
        others = [block for block in range(BLOCKS) if block not in TARGET[1] + TARGET[2]]
        assert not self.memory["decode"][:, others].any()

    @invariant()
    def what_is_released_is_not_read(self) -> None:
        new = self.boxes["prefill"].take().released
        assert not new & self.released
        self.released |= new
        assert self.released <= {str(epoch) for epoch in self.ended}
        assert not {job.handoff[0][1] for job, *_ in self.sides["prefill"].writes.in_flight} & {
            int(n) for n in self.released
        }

    def teardown(self) -> None:
        """However it went, time and a network that delivers end both epochs on both sides."""
        for epoch in EPOCHS:
            self.end(epoch)
        for _ in range(4):
            for side in ("prefill", "decode"):
                self.run_out_of_time(side, True)
            while self.wires["decode"].sent or self.wires["prefill"].sent or self.sides["prefill"].writes.in_flight:
                self.write(0)
                self.deliver_all_in_order()
                self.what_is_over_is_not_written()
            self.what_is_released_is_not_read()
        assert set(self.frozen) == self.offered
        assert self.released == {str(epoch) for epoch in EPOCHS}
        assert len(self.sides["prefill"]) == len(self.sides["decode"]) == 0
        for plane in self.planes.values():
            plane.close()


TestEpochs = pytest.mark.slow(Epochs.TestCase)
TestEpochs.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
