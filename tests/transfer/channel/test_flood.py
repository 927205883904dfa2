"""Many random handoffs under faults: every byte that arrives is right, and no block is lost or written once it is free.

A decode block that is given back is marked, and its marks are looked at when it is taken again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.transfer.channel.flood_replicas import BLOCK_BYTES, LOST, TOTAL_HEADS, FaultyPlane, Replica
from transfer.channel.layers import Chunk
from transfer.channel.outbox import Key
from transfer.control.messages import FirstToken
from transfer.control.token_sender import TokenSender
from transfer.memory.blocks import blocks_for
from transfer.memory.partition import Partition

LONGEST = 9  # blocks of a prompt


@dataclass(slots=True)
class Handoff:
    """One handoff and what is still to happen to it, as (event, argument)."""

    name: str
    key: Key
    prompt: int
    first_block: int
    prefill: Replica
    decode: Replica
    source: list[int]
    target: list[int]
    whole: np.ndarray
    events: list[tuple[str, int]] = field(default_factory=list)
    is_source_held: bool = True
    is_target_held: bool = True

    @property
    def is_over(self) -> bool:
        source, target = self.is_source_held and not self.prefill.is_gone, self.is_target_held
        return not (self.events or source or (target and not self.decode.is_gone))


class Flood:
    """Handoffs between one prefill and one decode replica at a time; either is sometimes replaced by a new one."""

    def __init__(
        self, make_side: Callable[..., Any], seed: int, block_size: int, prefill: Partition, decode: Partition
    ) -> None:
        self.random, self.make_side, self.block_size = random.Random(seed), make_side, block_size
        self.partitions = {"prefill": prefill, "decode": decode}
        self.prefill, self.decode = self.replica("prefill"), self.replica("decode")
        self.sender = TokenSender(self.decode.sides[0].seal)
        self.active: list[Handoff] = []
        self.intact = self.broken = 0
        self.gone: list[tuple[Replica, list[np.ndarray]]] = []

    def replica(self, role: str) -> Replica:
        sides = [
            self.make_side(
                role,
                plane=FaultyPlane(f"{role}-{rank}-{self.random.getrandbits(64)}", self.random.getrandbits(32)),
                timeout_s=2.0,
                block_size=self.block_size,
                rank=rank,
                workers=self.partitions[role].workers,
                stages=self.partitions[role].stages,
                total_heads=TOTAL_HEADS,
            )
            for rank in range(self.partitions[role].workers)
        ]
        return Replica(sides, self.random)

    # ---- one handoff

    def begin(self, number: int) -> Handoff | None:
        """The next handoff, when there are blocks for it."""
        prompt = self.random.randint(1, LONGEST * self.block_size)
        count = blocks_for(prompt, self.block_size)
        first = self.random.randint(1, count - 1) if count > 1 and self.random.random() < 0.3 else 0
        if len(self.prefill.free) < count or len(self.decode.free) < count - first:
            return None
        handoff = Handoff(
            name=str(number),
            key=(f"session {number // 2}", number % 2),  # two epochs of one session
            prompt=prompt,
            first_block=first,
            prefill=self.prefill,
            decode=self.decode,
            source=self.prefill.take(count),
            target=self.decode.take(count - first),
            whole=np.random.default_rng(number).integers(0, 256, (3, 2, count, BLOCK_BYTES), dtype=np.uint8),
        )
        self.prefill.fill(handoff.source, handoff.whole)
        handoff.events = self.script(prompt)
        return handoff

    def script(self, prompt: int) -> list[tuple[str, int]]:
        """Events in an order that could be."""
        pick = self.random
        cuts = sorted({pick.randint(1, prompt) for _ in range(pick.choice((0, 0, 1, 2, 4)))} | {prompt})
        events = [("save", cut) for cut in cuts]
        if pick.random() < 0.1:
            again = pick.randint(1, len(events))
            events[again:again] = [("preempt", 0), *events[:again]]
        events += [("token", 0), ("end", 1)]
        if pick.random() < 0.1:
            events[pick.randint(0, len(events) - 3) :] = [("end", 0)]
        offered = pick.randint(0, len(events)) if pick.random() < 0.5 else 0
        if pick.random() < 0.05:
            events.insert(offered, ("cancel_unoffered", 0))
            return events
        events.insert(offered, ("offer", 0))
        for _ in range(pick.choice((0, 0, 0, 0, 1, 2))):
            events.insert(pick.randint(offered + 1, len(events)), ("cancel", 0))
        return events

    def step(self, handoff: Handoff) -> None:
        event, argument = handoff.events.pop(0)
        replica = handoff.decode if event in ("offer", "cancel_unoffered", "cancel") else handoff.prefill
        if not replica.is_gone:
            getattr(self, event)(handoff, argument)

    def save(self, handoff: Handoff, computed: int) -> None:
        """One engine step, often of several requests."""
        batch = {handoff.name: (handoff, computed)}
        for other in self.active:
            is_next = other is not handoff and other.prefill is handoff.prefill and other.events[:1]
            if is_next and is_next[0][0] == "save" and self.random.random() < 0.3:
                batch[other.name] = (other, other.events.pop(0)[1])
        partition = self.partitions["decode"]
        chunks = [Chunk(h.key, h.name, cut, h.prompt, tuple(h.source), partition) for h, cut in batch.values()]
        for side in handoff.prefill.sides:
            side.channel.begin_step(chunks)
            for layer in side.layout.layers:
                side.channel.layer_saved(layer)
            side.channel.end_step()

    def preempt(self, handoff: Handoff, _: int) -> None:
        """Its blocks go to others, and what is in them is lost; it is computed again in others."""
        for side in handoff.prefill.sides:
            assert side.channel.wait_quiet([handoff.key], 10)
        handoff.prefill.give_back(handoff.source)
        handoff.source = handoff.prefill.take(len(handoff.source))
        handoff.prefill.fill(handoff.source, handoff.whole)

    def token(self, handoff: Handoff, _: int) -> None:
        if not handoff.decode.is_gone and self.random.random() > LOST:
            self.sender.send(handoff.decode.addresses[0], FirstToken(*handoff.key, int(handoff.name)))

    def end(self, handoff: Handoff, is_ok: int) -> None:
        for side in handoff.prefill.sides:
            side.channel.ended(handoff.key, handoff.name, bool(is_ok), self.partitions["decode"])

    def offer(self, handoff: Handoff, _: int) -> None:
        for rank, side in enumerate(handoff.decode.sides):
            peers, first = handoff.prefill.addresses, handoff.first_block
            side.channel.offer(handoff.key, handoff.name, peers, first, handoff.target, rank == 0)

    def cancel_unoffered(self, handoff: Handoff, _: int) -> None:
        for side in handoff.decode.sides:
            side.channel.cancel_unoffered(handoff.key, handoff.prefill.addresses, "aborted")
        handoff.decode.give_back(handoff.target)
        handoff.is_target_held = False

    def cancel(self, handoff: Handoff, _: int) -> None:
        for side in handoff.decode.sides:
            side.channel.cancel(handoff.key, "aborted")

    # ---- what comes of it

    def settle(self) -> None:
        """Take results: check what arrived, and give blocks back."""
        for replica in (self.prefill, self.decode):
            for side in replica.sides:
                side.collect()
        for handoff in self.active:
            name, prefill, decode = handoff.name, handoff.prefill, handoff.decode
            if handoff.is_target_held and not decode.is_gone:
                received = [name in side.results.received for side in decode.sides]
                if all(
                    is_here or name in side.results.broken for is_here, side in zip(received, decode.sides, strict=True)
                ):
                    self.arrived(handoff, all(received))
            if handoff.is_source_held and not prefill.is_gone:
                handoff.is_source_held = any(name not in side.results.released for side in prefill.sides)
                if not handoff.is_source_held:
                    prefill.give_back(handoff.source)
        self.active = [handoff for handoff in self.active if not handoff.is_over]

    def arrived(self, handoff: Handoff, is_whole: bool) -> None:
        if is_whole:
            assert handoff.decode.holds(handoff.target, handoff.whole[:, :, handoff.first_block :])
            assert handoff.decode.sides[0].results.received[handoff.name] == int(handoff.name)
        self.intact += is_whole
        self.broken += not is_whole
        handoff.decode.give_back(handoff.target)
        handoff.is_target_held = False

    def replace(self, role: str) -> None:
        """A replica goes away in the middle of everything, and a new one comes."""
        replica: Replica = getattr(self, role)
        replica.close()
        self.gone.append((replica, [side.memory.copy() for side in replica.sides]))
        setattr(self, role, self.replica(role))

    def run(self, handoffs: int, at_once: int, replace_every: int) -> None:
        number = 0
        while number < handoffs or self.active:
            ready = [handoff for handoff in self.active if handoff.events]
            if number < handoffs and len(self.active) < at_once and (handoff := self.begin(number)):
                self.active.append(handoff)
                number += 1
                if number % replace_every == 0:
                    self.replace(self.random.choice(("prefill", "decode")))
            elif ready:
                self.step(self.random.choice(ready))
            else:
                self.wait(number < handoffs, at_once)
            if number % 4 == 0:
                self.settle()

    def wait(self, is_more: bool, at_once: int) -> None:
        """Until there is something to do again, or nothing more."""

        def has_come() -> bool:
            self.settle()
            room = min(len(self.prefill.free), len(self.decode.free)) >= LONGEST and len(self.active) < at_once
            return not self.active or (is_more and room)

        self.prefill.sides[0].until(has_come)

    def assert_nothing_lost(self) -> None:
        for replica in (self.prefill, self.decode):
            assert sorted(replica.free) == list(range(replica.sides[0].blocks))
            for side in replica.sides:
                side.wait_idle()
                assert side.counter("bad_messages") == 0
        self.decode.assert_marked(self.decode.free)
        for replica, memories in self.gone:
            for side, memory in zip(replica.sides, memories, strict=True):
                assert np.array_equal(side.memory, memory), "memory of a closed channel was written"


# seed, tokens a block, how prefill and decode split the KV, handoffs
SHARDS = [
    (1, 1, Partition(), Partition(), 1500),
    (2, 2, Partition(), Partition(), 1500),
    (3, 3, Partition(), Partition(), 1500),
    (4, 4, Partition(), Partition(), 1500),
    (5, 7, Partition(), Partition(), 1500),
    (6, 16, Partition(), Partition(), 1500),
    (7, 4, Partition(), Partition(2), 400),
    (8, 8, Partition(2), Partition(), 400),
    (9, 4, Partition(2), Partition(4), 200),
    (10, 4, Partition(), Partition(1, (1, 2)), 400),
    (11, 8, Partition(1, (2, 1)), Partition(), 400),
    (12, 4, Partition(1, (1, 1, 1)), Partition(1, (1, 2)), 400),
    (13, 4, Partition(2, (2, 1)), Partition(1, (1, 2)), 200),
    (14, 4, Partition(4), Partition(2, (2, 1)), 200),
]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "block_size", "prefill", "decode", "handoffs"), SHARDS, ids=str)
def test_no_byte_is_wrong_and_no_block_is_lost(
    make_side: Callable[..., Any], seed: int, block_size: int, prefill: Partition, decode: Partition, handoffs: int
) -> None:
    flood = Flood(make_side, seed, block_size, prefill, decode)
    try:
        flood.run(handoffs, at_once=16, replace_every=97)
    finally:
        flood.sender.close()
    flood.assert_nothing_lost()
    # A slow machine breaks more handoffs: their time is over before they are. Nearly half arrive on an idle one.
    assert flood.intact > handoffs / 10
    assert flood.broken > handoffs / 10
