"""Two thousand jobs at random for a store's thread, on a disk that fails, fills, breaks and hangs: no byte is wrong."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.transfer.store.conftest import BLOCK_BYTES, BLOCKS, Cache, disk_config, keys_of
from tests.transfer.store.test_random import damage
from transfer.store import disk_tier
from transfer.store.block_file import open_block_file
from transfer.store.block_store import BlockStore
from transfer.store.config import StoreConfig
from transfer.store.refs import chain
from transfer.store.worker import StoreResults, StoreWorker

JOBS, OPEN, MOST, MARK, WAIT_S = 2000, 6, 8, 0xA5, 60.0
PROMPTS = [keys_of(name, MOST) for name in range(12)]
LENT = range(MOST)
"""The blocks of the memory that have the first prompt, and are lent."""


class Disk:
    """A block file whose calls fail now and then, and hang until `goes_on` is set."""

    def __init__(self, file: Any, chance: random.Random) -> None:
        self._file, self._chance = file, chance
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.fails = 0.0

    def read(self, *arguments: Any) -> None:
        self._call("read", errno.EIO, arguments)

    def write(self, *arguments: Any) -> None:
        self._call("write", errno.ENOSPC, arguments)

    def _call(self, name: str, error: int, arguments: Sequence[Any]) -> None:
        assert self.goes_on.wait(WAIT_S)
        if self._chance.random() < self.fails:
            raise OSError(error, os.strerror(error))
        getattr(self._file, name)(*arguments)

    def close(self) -> None:
        self._file.close()


class Lender:
    """Lends the first prompt's blocks. `out`: how many are borrowed."""

    def __init__(self) -> None:
        self.out = 0

    def borrow(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        self.out += len(keys)
        return tuple(LENT[PROMPTS[0].index(key)] for key in keys)

    def give_back(self, blocks: Sequence[int]) -> None:
        self.out -= len(blocks)


@dataclass(slots=True)
class Job:
    """A store or a load. `gone`: keys that no load may find. `left`: what its blocks had when it was given up."""

    keys: list[bytes]
    blocks: list[int]
    gone: set[bytes] = field(default_factory=set)
    left: np.ndarray | None = None


class Jobs:
    """Asks a worker for jobs. Free blocks of the memory are marked, and so are those that are to be loaded."""

    def __init__(self, cache: Cache, path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.path, self.chance = cache, path, random.Random(seed)
        self.lender, self.disks = Lender(), list[Disk]()

        def opened(*arguments: Any) -> Disk:
            self.disks.append(Disk(open_block_file(*arguments), random.Random(seed + 1)))
            return self.disks[-1]

        monkeypatch.setattr(disk_tier, "open_block_file", opened)
        monkeypatch.setattr(disk_tier, "SystemFile", Disk)
        cache.array[:] = MARK
        for block, key in zip(LENT, PROMPTS[0], strict=True):
            cache.write(block, key)
        config = StoreConfig("model", 6 * BLOCK_BYTES, disk_config(path, 30))
        self.worker = StoreWorker(BlockStore(cache.memory, config))
        self.free = set(range(len(LENT), BLOCKS))
        self.stores, self.loads, self.gone = dict[str, Job](), dict[str, Job](), set[bytes]()
        self.right = self.missed = self.given_up = 0

    @property
    def disk(self) -> Disk:
        (disk,) = self.disks
        return disk

    def act(self, number: int) -> None:
        kinds = {"store": 30, "lend": 4, "load": 40, "give up": 8, "delete": 3, "touch": 3, "damage": 3, "disk": 9}
        keys = self.chance.choice(PROMPTS)[: self.chance.randint(1, MOST)]
        match self.chance.choices(list(kinds), list(kinds.values()))[0]:
            case "store":
                self._store(f"s{number}", keys)
            case "load":
                self._load(f"l{number}", keys)
            case "lend" if self.worker.store_lent(PROMPTS[0], self.lender):
                self._come_back(PROMPTS[0])
            case "give up" if self.loads:
                self._give_up(self.loads[name := self.chance.choice(sorted(self.loads))], name)
            case "delete" if self.worker.delete(keys):
                self.gone |= set(keys)
            case "touch":
                self.worker.touch(keys)
            case "damage":
                damage(self.path, self.chance)
            case "disk":
                self.disk.fails = self.chance.choice((0.0, 0.0, 0.3))
                (self.disk.goes_on.set if self.chance.random() < 0.5 else self.disk.goes_on.clear)()

    def _take(self, count: int) -> list[int]:
        taken = self.chance.sample(sorted(self.free), count)
        self.free -= set(taken)
        return taken

    def _store(self, name: str, keys: list[bytes]) -> None:
        job = Job(keys, self._take(len(keys)))
        for block, key in zip(job.blocks, keys, strict=True):
            self.cache.write(block, key)
        if self.worker.store(name, chain(keys), job.blocks):
            self.stores[name] = job
            self._come_back(keys)
        else:
            self._free(job)

    def _come_back(self, keys: list[bytes]) -> None:
        """They are stored again. A load that waits for a delete may wait for what was queued behind that, too."""
        self.gone -= set(keys)
        for load in self.loads.values():
            load.gone -= set(keys)

    def _load(self, name: str, keys: list[bytes]) -> None:
        job = Job(keys, self._take(len(keys)), self.gone & set(keys))
        if self.worker.load(name, keys, job.blocks):
            self.loads[name] = job
        else:
            self._free(job)

    def _give_up(self, job: Job, name: str) -> None:
        self.worker.give_up(name)
        job.left = self.cache.array[:, :, job.blocks].copy() if job.left is None else job.left

    def _free(self, job: Job) -> None:
        self.cache.array[:, :, job.blocks] = MARK
        self.free |= set(job.blocks)

    def settled(self) -> int:
        """Look at the jobs that have ended. Returns how many are open."""
        results: StoreResults = self.worker.take_results()
        for name in results.stored:
            self._free(self.stores.pop(name))
        for name, done in results.loaded.items():
            self._check(job := self.loads.pop(name), done)
            self._free(job)
        return len(self.stores) + len(self.loads)

    def _check(self, job: Job, done: list[bool]) -> None:
        if job.left is not None:
            assert np.array_equal(self.cache.array[:, :, job.blocks], job.left), "it was given up"
            self.given_up += 1
            return
        for block, key, is_loaded in zip(job.blocks, job.keys, done, strict=True):
            assert not (is_loaded and key in job.gone), "it was deleted"
            assert self.cache.has(block, key) if is_loaded else (self.cache.array[:, :, block] == MARK).all()
        self.right, self.missed = self.right + done.count(True), self.missed + done.count(False)

    def untouched(self) -> bool:
        return bool((self.cache.array[:, :, sorted(self.free)] == MARK).all())


def until_fewer(jobs: Jobs, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while jobs.settled() >= count:
        jobs.disk.goes_on.set()
        assert time.monotonic() < deadline
        time.sleep(0.0002)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_byte_is_wrong_and_nothing_is_left(
    cache: Cache, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(cache, tmp_path, seed, monkeypatch)
    try:
        for number in range(JOBS // 2):
            until_fewer(jobs, OPEN)
            assert jobs.untouched()
            jobs.act(number)
        until_fewer(jobs, 1)
        counters = jobs.worker.counters()
        while counters["open_jobs"]:
            jobs.disk.goes_on.set()
            counters = jobs.worker.counters()
    finally:
        jobs.disk.goes_on.set()
        assert jobs.worker.close(WAIT_S)
    assert jobs.untouched()
    assert not jobs.lender.out
    assert jobs.right > JOBS / 4
    assert jobs.missed > JOBS / 40
    assert jobs.given_up > JOBS / 200
    assert counters["disk_errors"] + counters["digest_failures"] > 0
