"""Fetches of cached blocks from another worker: what comes, what does not, and what is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.transfer.channel.wire_peer import Peer, prefill_all
from transfer.control.messages import Cancel, Failed, Fetch, Found
from transfer.memory.partition import Partition

FETCH, HANDOFF = ("fetched", 1), ("session", 1)
HELD, TARGET = [5, 6, 9], [20, 3, 4]


def name(block: int) -> bytes:
    return block.to_bytes(32, "little")


class Shelf:
    """A library of some blocks that are named by their number. `lent`: how often each block is borrowed now."""

    def __init__(self, *blocks: int) -> None:
        self.blocks, self.lent, self.gave_back = blocks, dict.fromkeys(blocks, 0), 0

    def borrow(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        found = []
        for wanted in hashes:
            block = int.from_bytes(wanted, "little")
            if block not in self.blocks:
                break
            found.append(block)
            self.lent[block] += 1
        return tuple(found)

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.lent[block], "a block was given back twice"
            self.lent[block] -= 1
        self.gave_back += 1

    @property
    def is_whole(self) -> bool:
        return not any(self.lent.values())


def fetch(side: Any, source: Any, held: Sequence[int] = HELD, request_id: str = "r", timeout_s: float = 60.0) -> None:
    names = [name(block) for block in held]
    side.channel.fetch(FETCH, request_id, [source.channel.address], TARGET[: len(held)], names, timeout_s)


@pytest.mark.parametrize("has", range(4))
def test_the_leading_blocks_that_the_source_has_come(prefill: Any, decode: Any, has: int) -> None:
    shelf = Shelf(*HELD[:has], 40)
    prefill.fill(HELD, 1)
    prefill.channel.lend(shelf)
    fetch(decode, prefill)
    assert decode.wait("fetched", "r") == has
    came, others = TARGET[:has], [block for block in range(decode.blocks) if block not in TARGET[:has]]
    assert np.array_equal(decode.memory[:, :, came], prefill.memory[:, :, HELD[:has]])
    assert not decode.memory[:, :, others].any()
    prefill.wait_idle()
    assert shelf.is_whole
    assert decode.counter("blocks_fetched") == has
    assert (decode.counter("fetch_s") > 0) is (has > 0)
    assert decode.counter("fetches_broken") == (has < 3)
    assert prefill.counter("fetches_landed") == (has > 0)
    assert not prefill.counter("handoffs_landed")


def test_nothing_comes_from_a_worker_that_lends_nothing(prefill: Any, decode: Any) -> None:
    fetch(decode, prefill)
    assert decode.wait("fetched", "r") == 0
    decode.wait_idle()


def test_both_fetch_from_each_other_at_once(prefill: Any, decode: Any) -> None:
    shelves = Shelf(*HELD), Shelf(*HELD)
    for side, shelf, seed in ((prefill, shelves[0], 1), (decode, shelves[1], 2)):
        side.fill(HELD, seed)
        side.channel.lend(shelf)
    fetch(decode, prefill)
    fetch(prefill, decode)
    assert decode.wait("fetched", "r") == prefill.wait("fetched", "r") == 3
    assert np.array_equal(decode.memory[:, :, TARGET], prefill.memory[:, :, HELD])
    assert np.array_equal(prefill.memory[:, :, TARGET], decode.memory[:, :, HELD])
    prefill.wait_idle()
    decode.wait_idle()
    assert all(shelf.is_whole for shelf in shelves)


def test_a_handoff_goes_on_beside_a_fetch(prefill: Any, decode: Any) -> None:
    shelf = Shelf(*HELD)
    prefill.channel.lend(shelf)
    prefill.fill(HELD, 1)
    decode.channel.offer(HANDOFF, "d", [prefill.channel.address], 0, [30, 31], False)
    fetch(decode, prefill)
    prefill_all(prefill, HANDOFF)
    assert decode.wait("received", "d") is None
    assert decode.wait("fetched", "r") == 3
    assert prefill.wait("released", "p")
    assert "r" not in prefill.collect().released


def test_a_source_that_is_gone_is_no_source(prefill: Any, decode: Any) -> None:
    prefill.channel.lend(Shelf(*HELD))
    prefill.channel.close()
    fetch(decode, prefill)
    assert decode.wait("fetched", "r") == 0
    decode.wait_idle()


def hold_writes(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No write of this side begins until `monkeypatch.undo`."""
    monkeypatch.setattr(side.channel._prefill.writes._pacer, "pop", lambda now: None)


def test_a_fetch_that_is_cancelled_ends_when_nothing_is_written_any_more(
    prefill: Any, decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(*HELD)
    prefill.channel.lend(shelf)
    prefill.fill(HELD, 1)
    hold_writes(prefill, monkeypatch)
    fetch(decode, prefill)
    prefill.until(lambda: not shelf.is_whole)
    decode.channel.cancel(FETCH, "aborted")
    assert decode.wait("fetched", "r") == 0
    prefill.wait_idle()
    assert shelf.is_whole
    assert not decode.memory.any()


def test_a_fetch_ends_with_its_time(prefill: Any, decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(*HELD)
    prefill.channel.lend(shelf)
    hold_writes(prefill, monkeypatch)
    fetch(decode, prefill, timeout_s=0.05)
    assert decode.wait("fetched", "r") == 0
    prefill.wait_idle()
    assert shelf.is_whole


def test_a_fetch_that_does_not_stop_in_its_time_is_late_and_ends_when_its_source_goes_on(
    prefill: Any, decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, goes_on, progress = Shelf(*HELD), threading.Event(), prefill.channel._prefill.progress
    prefill.channel.lend(shelf)
    hold_writes(prefill, monkeypatch)
    monkeypatch.setattr(prefill.channel._prefill, "progress", lambda: goes_on.wait(60.0) and progress())
    fetch(decode, prefill, timeout_s=0.05)
    try:
        assert decode.wait("late", "r")
        assert not decode.collect().fetched
        assert decode.counter("open_receiving") == 1
    finally:
        goes_on.set()
    assert decode.wait("fetched", "r") == 0
    prefill.wait_idle()
    assert shelf.is_whole
    assert not decode.memory.any()


def test_the_engine_gets_borrowed_blocks_back(prefill: Any, decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(*HELD)
    prefill.channel.lend(shelf)
    hold_writes(prefill, monkeypatch)
    fetch(decode, prefill)
    prefill.until(lambda: not shelf.is_whole)
    assert prefill.channel.recall(60.0)
    assert shelf.is_whole
    assert decode.wait("fetched", "r") == 0
    assert prefill.channel.recall(60.0), "there is nothing to recall"


def ask_for(blocks: Sequence[int], hashes: Sequence[bytes], rank: int = 0) -> Fetch:
    return Fetch(*FETCH, rank, list(blocks), list(hashes), 10.0)


@pytest.mark.parametrize(
    "message",
    [
        ask_for([], []),
        ask_for([1, 2], [name(5)]),
        ask_for([1, 1], [name(5), name(6)]),
        ask_for([64], [name(5)]),
        ask_for([-1], [name(5)]),
        ask_for([1], [name(5)], rank=1),
    ],
    ids=["nothing", "unlike numbers", "one block twice", "a block too high", "a block below 0", "another rank"],
)
def test_a_fetch_that_cannot_be_is_refused(prefill: Any, peer: Peer, message: Fetch) -> None:
    shelf = Shelf(*HELD)
    prefill.channel.lend(shelf)
    assert isinstance(peer.ask(message), Failed)
    assert prefill.counter("open_writing") == 0
    assert shelf.gave_back == 0


def test_a_fetch_that_is_repeated_does_not_end_the_first(
    prefill: Any, peer: Peer, make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer would free the blocks that the first still writes."""
    shelf = Shelf(*HELD)
    prefill.channel.lend(shelf)
    hold_writes(prefill, monkeypatch)
    assert peer.ask(ask_for([1], [name(5)])) == Found(*FETCH, 1)
    peer.say(ask_for([2], [name(6)]))
    other = make_peer()
    other.ask(other.hello)
    assert isinstance(other.ask(ask_for([1], [name(5)])), Failed), "of another worker, to which nothing is written"
    assert isinstance(peer.ask(Cancel(*FETCH, 0, "aborted")), Failed), "the next answer is that to the cancel"
    assert isinstance(peer.ask(ask_for([1], [name(5)])), Failed)
    assert shelf.is_whole
    assert shelf.gave_back == 1


def test_a_fetch_does_not_touch_a_handoff_of_its_name(prefill: Any, peer: Peer) -> None:
    shelf = Shelf(*HELD)
    prefill.channel.lend(shelf)
    prefill.save(FETCH, "p", 4, 8, [7, 8])
    assert isinstance(peer.ask(ask_for([1], [name(5)])), Failed)
    prefill.channel.ended(FETCH, "p", False)
    peer.say(Cancel(*FETCH, 0, "aborted"))
    assert prefill.wait("released", "p")


@pytest.mark.parametrize("has", [1, 3])
def test_each_worker_fetches_its_heads(make_side: Callable[..., Any], has: int) -> None:
    """Two workers of one replica fetch under one key from the two of another."""
    sources = [make_side(f"source {rank}", rank=rank, workers=2, total_heads=2) for rank in range(2)]
    targets = [make_side(f"target {rank}", rank=rank, workers=2, total_heads=2) for rank in range(2)]
    shelves = [Shelf(*HELD[:has]) for _ in sources]
    for number, (source, shelf) in enumerate(zip(sources, shelves, strict=True)):
        source.memory[:, :, HELD] = number + 1
        source.channel.lend(shelf)
    names, addresses = [name(block) for block in HELD], [source.channel.address for source in sources]
    for target in targets:
        target.channel.fetch(FETCH, "r", addresses, TARGET, names, 60.0)
    for number, target in enumerate(targets):
        assert target.wait("fetched", "r") == has
        assert (target.memory[:, :, TARGET[:has]] == number + 1).all()
    for source, shelf in zip(sources, shelves, strict=True):
        source.wait_idle()
        assert shelf.is_whole


def whole_of(sides: list[Any], blocks: Sequence[int]) -> np.ndarray:
    """The bytes of some blocks of a replica: of all layers and heads."""
    tensor = sides[0].layout.partition.tensor
    stages = [sides[begin : begin + tensor] for begin in range(0, len(sides), tensor)]
    return np.concatenate([np.concatenate([s.memory[:, :, blocks] for s in stage], axis=-1) for stage in stages])


@pytest.mark.parametrize(
    "partitions",
    [
        (Partition(), Partition(2)),
        (Partition(2), Partition()),
        (Partition(), Partition(1, (1, 2))),
        (Partition(1, (1, 2)), Partition()),
        (Partition(1, (1, 2)), Partition(1, (2, 1))),
        (Partition(2, (1, 2)), Partition(1, (2, 1))),
    ],
    ids=str,
)
def test_replicas_of_other_partitions_fetch_from_each_other(
    make_side: Callable[..., Any], partitions: tuple[Partition, Partition]
) -> None:
    sources, targets = (
        [
            make_side(f"{kind} {rank}", rank=rank, workers=partition.workers, stages=partition.stages, total_heads=2)
            for rank in range(partition.workers)
        ]
        for kind, partition in zip(("source", "target"), partitions, strict=True)
    )
    shelves = [Shelf(*HELD) for _ in sources]
    draw = np.random.default_rng(1)
    for source, shelf in zip(sources, shelves, strict=True):
        source.memory[:] = draw.integers(1, 256, source.memory.shape, dtype=np.uint8)
        source.channel.lend(shelf)
    names, addresses = [name(block) for block in HELD], [source.channel.address for source in sources]
    for target in targets:
        target.channel.fetch(FETCH, "r", addresses, TARGET, names, 60.0)
    for target in targets:
        assert target.wait("fetched", "r") == len(HELD)
    assert np.array_equal(whole_of(targets, TARGET), whole_of(sources, HELD))
    for source in sources:
        source.wait_idle()
    assert all(shelf.is_whole for shelf in shelves)


def test_what_one_stage_lacks_is_not_here(make_side: Callable[..., Any]) -> None:
    """A block is of use with all of its layers only."""
    sources = [make_side(f"source {rank}", rank=rank, workers=2, stages=(1, 2)) for rank in range(2)]
    target, shelves = make_side("target"), [Shelf(*HELD), Shelf(*HELD[:1])]
    for source, shelf in zip(sources, shelves, strict=True):
        source.channel.lend(shelf)
    names = [name(block) for block in HELD]
    target.channel.fetch(FETCH, "r", [source.channel.address for source in sources], TARGET, names, 60.0)
    assert target.wait("fetched", "r") == 1
    for source in sources:
        source.wait_idle()
    assert all(shelf.is_whole for shelf in shelves)


def test_a_stranger_is_refused(prefill: Any, make_peer: Callable[..., Peer]) -> None:
    shelf = Shelf(*HELD)
    prefill.channel.lend(shelf)
    stranger = make_peer()
    stranger.ask(ask_for([1], [name(5)]))
    assert prefill.counter("open_writing") == 0
    assert not stranger.memory.any()
    assert shelf.is_whole
