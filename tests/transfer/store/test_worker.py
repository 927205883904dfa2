"""The thread: each job has one result, loads go first, and the end is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.transfer.store.conftest import BLOCK_BYTES, Cache, disk_config, keys_of
from transfer.store.block_memory import HostMemory
from transfer.store.block_store import BlockStore
from transfer.store.config import DiskConfig, StoreConfig
from transfer.store.disk_tier import STAGED_BLOCKS, DiskTier
from transfer.store.ledger import Tier
from transfer.store.refs import StoreError, chain
from transfer.store.worker import StoreResults, StoreWorker

WAIT_S = 60.0


class Gate(HostMemory):
    """Memory whose `gather` waits until the gate is open, and fails where it is told."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache.layout)
        self.is_open, self.entered, self.error = threading.Event(), threading.Event(), ""

    def gather(self, blocks: Any, into: Any) -> None:
        self.entered.set()
        assert self.is_open.wait(WAIT_S)
        if self.error:
            raise RuntimeError(self.error)
        super().gather(blocks, into)


class Asked:
    """A worker over a gate, and all that it has reported."""

    def __init__(self, cache: Cache, jobs: int) -> None:
        self.gate, self.news, self.seen = Gate(cache), threading.Event(), StoreResults()
        self.order: list[str] = []
        store = BlockStore(self.gate, StoreConfig("model", 32 * BLOCK_BYTES))
        self.worker = StoreWorker(store, self.news.set, jobs)

    def wait(self, *job_ids: str) -> StoreResults:
        while True:
            self.news.clear()
            new = self.worker.take_results()
            for mine, more in ((self.seen.stored, new.stored), (self.seen.loaded, new.loaded)):
                assert not mine.keys() & more.keys()
                mine.update(more)
            if set(job_ids) <= self.seen.stored.keys() | self.seen.loaded.keys():
                return self.seen
            assert self.news.wait(WAIT_S)


@pytest.fixture
def make_asked(cache: Cache) -> Iterator[Callable[..., Asked]]:
    made: list[Asked] = []

    def make(jobs: int = 256, is_open: bool = True) -> Asked:
        made.append(Asked(cache, jobs))
        if is_open:
            made[-1].gate.is_open.set()
        return made[-1]

    yield make
    for asked in made:
        asked.gate.is_open.set()
        assert asked.worker.close(WAIT_S)


def test_a_store_and_a_load(make_asked: Callable[..., Asked], cache: Cache) -> None:
    asked, keys = make_asked(), keys_of("a", 3)
    for block, key in enumerate(keys):
        cache.write(block, key)
    assert asked.worker.store("s", chain(keys), [0, 1, 2])
    asked.wait("s")
    assert asked.worker.lookup(keys) == [Tier.HOST] * 3
    assert asked.worker.load("l", [*keys, *keys_of("b", 1)], [5, 6, 7, 8])
    results = asked.wait("l")
    assert results.stored == {"s": [True] * 3}
    assert results.loaded == {"l": [True, True, True, False]}
    assert asked.worker.take_changes() == {(Tier.HOST, key): True for key in keys}
    assert asked.worker.take_changes() == {}
    assert all(cache.has(block, key) for block, key in zip((5, 6, 7), keys, strict=True))
    assert asked.worker.counters()["host_hits"] == 3


def note(store: BlockStore, name: str, done: list[str]) -> None:
    """Have a method of a store note that it is called."""
    call = getattr(store, name)

    def noted(*arguments: Any) -> Any:
        done.append(name)
        return call(*arguments)

    setattr(store, name, noted)


def test_loads_overtake_stores_but_no_delete(make_asked: Callable[..., Asked]) -> None:
    asked, keys = make_asked(is_open=False), keys_of("a", 4)
    done: list[str] = []
    for name in ("store", "load"):
        note(asked.worker._store, name, done)
    asked.worker.store("0", chain(keys[:1]), [0])
    assert asked.gate.entered.wait(WAIT_S)
    asked.worker.store("1", chain(keys[:2]), [0, 1])
    asked.worker.load("2", keys[:1], [5])
    asked.gate.is_open.set()
    asked.wait("0", "1", "2")
    assert done == ["store", "load", "store"]
    asked.gate.is_open.clear()
    asked.gate.entered.clear()
    asked.worker.store("3", chain(keys[:3]), [0, 1, 2])
    assert asked.gate.entered.wait(WAIT_S)
    asked.worker.delete(keys)
    asked.worker.load("4", keys, [5, 6, 7, 8])
    asked.gate.is_open.set()
    assert asked.wait("3", "4").loaded["4"] == [False] * 4


def test_a_full_queue_refuses(make_asked: Callable[..., Asked]) -> None:
    asked, keys = make_asked(jobs=2, is_open=False), keys_of("a", 1)
    asked.worker.store("0", chain(keys), [0])
    assert asked.gate.entered.wait(WAIT_S)
    assert asked.worker.store("1", chain(keys), [0])
    assert asked.worker.load("2", keys, [1])
    assert not asked.worker.load("3", keys, [1])
    assert not asked.worker.touch(keys)
    asked.gate.is_open.set()
    asked.wait("0", "1", "2")
    assert asked.worker.touch(keys)


def test_lists_of_unequal_length_are_refused(make_asked: Callable[..., Asked]) -> None:
    with pytest.raises(ValueError, match="2 keys for 1 blocks"):
        make_asked().worker.load("l", keys_of("a", 2), [0])


def test_what_waits_at_the_end_has_results(make_asked: Callable[..., Asked]) -> None:
    asked, keys = make_asked(is_open=False), keys_of("a", 2)
    asked.worker.store("0", chain(keys[:1]), [0])
    assert asked.gate.entered.wait(WAIT_S)
    asked.worker.store("1", chain(keys), [0, 1])
    asked.worker.load("2", keys, [3, 4])
    assert not asked.worker.close(timeout_s=0.01)  # the thread is in the middle of a job
    asked.gate.is_open.set()
    assert asked.worker.close(WAIT_S)
    results = asked.wait("0", "1", "2")
    assert results.stored == {"0": [True], "1": [False, False]}
    assert results.loaded == {"2": [False, False]}
    assert not asked.worker.load("3", keys, [0, 1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread dies on purpose
def test_a_thread_that_died_says_so(make_asked: Callable[..., Asked]) -> None:
    asked = make_asked()
    asked.gate.error = "the device is gone"
    asked.worker.store("0", chain(keys_of("a", 1)), [0])
    with pytest.raises(StoreError, match="thread died"):
        asked.wait("0")
    assert asked.worker.has_news
    assert not asked.worker.store("1", chain(keys_of("a", 1)), [0])


class Lent:
    """Blocks that are there, by their keys. What is lent must come back."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.out: list[int] = []
        self.most = 0

    def borrow(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        found = []
        for key in keys:
            if key not in self.blocks:
                break
            found.append(self.blocks[key])
        self.out += found
        self.most = max(self.most, len(self.out))
        return tuple(found)

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.out.remove(block)


@pytest.mark.parametrize("gone", [0, 3, 12, 20])
def test_blocks_that_are_lent_are_stored_as_far_as_they_are_there(
    gone: int, make_asked: Callable[..., Asked], cache: Cache
) -> None:
    """From the first that is gone on, nothing is. A few are lent at once."""
    asked, keys, lent = make_asked(), keys_of("a", 20), Lent()
    for block, key in enumerate(keys[:gone]):
        cache.write(block, key)
        lent.blocks[key] = block
    assert asked.worker.store_lent(keys, lent)
    assert asked.worker.store("after", chain(keys_of("b", 1)), [40])
    asked.wait("after")
    assert asked.worker.lookup(keys) == [Tier.HOST] * gone + [None] * (20 - gone)
    assert asked.worker.leading(keys) == gone
    assert asked.worker.leading(keys[1:]) == max(0, gone - 1)
    assert not lent.out
    assert lent.most <= STAGED_BLOCKS
    cache.wipe()
    assert asked.worker.load("l", keys, range(20))
    assert asked.wait("l").loaded["l"] == [True] * gone + [False] * (20 - gone)
    assert all(cache.has(block, key) for block, key in enumerate(keys[:gone]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread dies on purpose
def test_what_is_lent_comes_back_when_the_copy_fails(make_asked: Callable[..., Asked]) -> None:
    asked, keys, lent = make_asked(is_open=False), keys_of("a", 2), Lent()
    lent.blocks = {key: block for block, key in enumerate(keys)}
    asked.gate.error = "broken"
    assert asked.worker.store_lent(keys, lent)
    asked.gate.is_open.set()
    assert asked.news.wait(WAIT_S)
    with pytest.raises(StoreError):
        asked.worker.take_results()
    assert not lent.out


def test_what_the_host_tier_has_is_on_the_disk_after_the_end(
    cache: Cache, tmp_path: Path, make_store: Callable[..., BlockStore]
) -> None:
    keys, config = keys_of("a", 3), StoreConfig("model", 8 * BLOCK_BYTES, disk_config(tmp_path, 8))
    for block, key in enumerate(keys):
        cache.write(block, key)
    worker = StoreWorker(BlockStore(cache.memory, config))
    assert worker.store("s", chain(keys), range(3))
    deadline = time.monotonic() + WAIT_S
    while "s" not in worker.take_results().stored:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert worker.lookup(keys) == [Tier.HOST] * 3
    assert worker.close(WAIT_S)
    assert make_store(disk=8).lookup(keys) == [Tier.DISK] * 3


class Writes(HostMemory):
    """Memory whose `scatter` waits until it may go on."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache.layout)
        self.may_go_on, self.entered = threading.Event(), threading.Event()

    def scatter(self, blocks: Any, sources: Any) -> None:
        self.entered.set()
        assert self.may_go_on.wait(WAIT_S)
        super().scatter(blocks, sources)


def loading(memory: HostMemory, cache: Cache, keys: Sequence[bytes], disk: DiskConfig) -> StoreWorker:
    """A worker that has stored `keys` on the disk."""
    for block, key in enumerate(keys):
        cache.write(block, key)
    store = BlockStore(memory, StoreConfig("model", disk=disk))
    assert store.store(chain(keys), range(len(keys))) == [True] * len(keys)
    cache.wipe()
    return StoreWorker(store)


def result_of(worker: StoreWorker, job_id: str) -> list[bool]:
    deadline = time.monotonic() + WAIT_S
    while job_id not in (loaded := worker.take_results().loaded):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return loaded[job_id]


def test_a_load_that_is_given_up_writes_nothing_more(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs before the second part of the blocks is read."""
    keys, hangs, goes_on = keys_of("a", STAGED_BLOCKS + 2), threading.Event(), threading.Event()
    worker = loading(cache.memory, cache, keys, disk_config(tmp_path, 16))
    read = DiskTier.read

    def hanging(tier: DiskTier, wanted: Sequence[bytes]) -> Any:
        if keys[-1] in wanted:
            hangs.set()
            assert goes_on.wait(WAIT_S)
        return read(tier, wanted)

    monkeypatch.setattr(DiskTier, "read", hanging)
    assert worker.load("l", keys, range(20, 20 + len(keys)))
    assert hangs.wait(WAIT_S)
    worker.give_up("l")
    before = cache.array.copy()
    goes_on.set()
    assert result_of(worker, "l") == [True] * STAGED_BLOCKS + [False] * 2
    assert (cache.array == before).all()
    assert worker.load("later", keys[-1:], [40])
    assert result_of(worker, "later") == [True]
    worker.give_up("unknown")
    assert worker.close(WAIT_S)


def test_giving_a_load_up_waits_for_the_write_that_is_under_way(cache: Cache, tmp_path: Path) -> None:
    keys, memory = keys_of("a", 2), Writes(cache)
    worker = loading(memory, cache, keys, disk_config(tmp_path, 16))
    assert worker.load("l", keys, [20, 21])
    assert memory.entered.wait(WAIT_S)
    gives_up = threading.Thread(target=worker.give_up, args=("l",))
    gives_up.start()
    gives_up.join(0.05)
    assert gives_up.is_alive(), "the blocks are still written"
    memory.may_go_on.set()
    gives_up.join(WAIT_S)
    assert not gives_up.is_alive()
    assert result_of(worker, "l") == [True, True]
    assert worker.close(WAIT_S)
