"""A disk that is corrupt, truncated, full or failing: a miss or an error that is counted, and never a wrong byte."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.transfer.store.conftest import BLOCK_BYTES, Cache, blocks_file, index_file, keys_of
from tests.transfer.store.test_block_store import got, put
from transfer.store import disk_tier, nixl_file
from transfer.store.block_file import SystemFile, open_block_file
from transfer.store.block_store import BlockStore
from transfer.store.ledger import Tier
from transfer.store.segment import slot_bytes

Make = Callable[..., BlockStore]
each_file = pytest.mark.parametrize("use_nixl", [False, pytest.param(True, marks=pytest.mark.slow)])


@each_file
@pytest.mark.parametrize("at", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_a_corrupt_block_is_a_miss(make_store: Make, cache: Cache, tmp_path: Path, at: int, use_nixl: bool) -> None:
    store, keys = make_store(disk=8, use_nixl=use_nixl), keys_of("a", 4)
    put(store, cache, keys)
    file = blocks_file(tmp_path)
    data = bytearray(file.read_bytes())
    data[2 * slot_bytes(BLOCK_BYTES) + at] ^= 1
    file.write_bytes(data)
    assert got(store, cache, keys) == [True, True, False, True]
    assert store.counters()["digest_failures"] == 1
    assert store.lookup(keys)[2] is None
    assert put(store, cache, keys) == [True] * 4
    assert got(store, cache, keys) == [True] * 4


@each_file
def test_a_truncated_file_is_a_miss_for_what_it_lacks(
    make_store: Make, cache: Cache, tmp_path: Path, use_nixl: bool
) -> None:
    store, keys = make_store(disk=8, use_nixl=use_nixl), keys_of("a", 8)
    put(store, cache, keys)
    os.truncate(blocks_file(tmp_path), 3 * slot_bytes(BLOCK_BYTES) + 100)
    assert got(store, cache, keys) == [True] * 3 + [False] * 5
    assert put(store, cache, keys) == [True] * 8
    assert got(store, cache, keys) == [True] * 8


def test_blocks_that_are_exchanged_are_misses(make_store: Make, cache: Cache, tmp_path: Path) -> None:
    store, keys, size = make_store(disk=2), keys_of("a", 2), slot_bytes(BLOCK_BYTES)
    put(store, cache, keys)
    data = blocks_file(tmp_path).read_bytes()
    blocks_file(tmp_path).write_bytes(data[size:] + data[:size])
    assert got(store, cache, keys) == [False, False]
    assert store.counters()["digest_failures"] == 2


def test_a_corrupt_host_block_comes_from_the_disk(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(host=4, disk=4), keys_of("a", 2)
    put(store, cache, keys)
    store.drain(60)
    store._host.view(1)[5] ^= 1
    assert got(store, cache, keys) == [True, True]
    counters = store.counters()
    assert (counters["host_hits"], counters["disk_hits"], counters["digest_failures"]) == (1, 1, 1)
    assert store.lookup(keys) == [Tier.HOST, Tier.DISK]


def test_what_another_wrote_between_two_starts_is_a_miss(make_store: Make, cache: Cache, tmp_path: Path) -> None:
    store, keys = make_store(disk=4), keys_of("a", 4)
    put(store, cache, keys)
    store.close()
    old_index = index_file(tmp_path).read_bytes()
    other = make_store(disk=4, fingerprint="other")
    put(other, cache, keys_of("b", 4))
    other.close()
    index_file(tmp_path).write_bytes(old_index)
    store = make_store(disk=4)
    assert store.lookup(keys) == [Tier.DISK] * 4
    assert got(store, cache, keys) == [False] * 4


class Failing:
    """A block file whose calls fail as told."""

    def __init__(self, file: Any, error: int) -> None:
        self._file, self._error = file, error
        self.fails = {"read": False, "write": False}

    def read(self, *arguments: Any) -> None:
        self._call("read", *arguments)

    def write(self, *arguments: Any) -> None:
        self._call("write", *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        if self.fails[name]:
            raise OSError(self._error, os.strerror(self._error))
        getattr(self._file, name)(*arguments)

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Failing]:
    """The files that stores open from now on fail when they are told. They count as the system's own."""
    made: list[Failing] = []

    def opened(*arguments: Any) -> Failing:
        made.append(Failing(open_block_file(*arguments), errno.ENOSPC))
        return made[-1]

    monkeypatch.setattr(disk_tier, "open_block_file", opened)
    monkeypatch.setattr(disk_tier, "SystemFile", Failing)
    return made


def test_a_full_disk_stores_nothing_and_keeps_what_it_has(
    make_store: Make, cache: Cache, failing: list[Failing]
) -> None:
    store, old, new = make_store(disk=8), keys_of("old", 2), keys_of("new", 3)
    put(store, cache, old)
    failing[0].fails["write"] = True
    assert put(store, cache, new) == [False] * 3
    assert got(store, cache, [*old, *new]) == [True, True, False, False, False]
    assert store.counters()["disk_errors"] == 1
    failing[0].fails["write"] = False
    assert put(store, cache, new) == [True] * 3


def test_a_block_that_cannot_be_read_is_a_miss(make_store: Make, cache: Cache, failing: list[Failing]) -> None:
    store, keys = make_store(disk=8), keys_of("a", 2)
    put(store, cache, keys)
    failing[0].fails["read"] = True
    assert got(store, cache, keys) == [False, False]
    failing[0].fails["read"] = False
    assert put(store, cache, keys) == [True, True]


def test_a_disk_that_goes_on_failing_is_left_alone(make_store: Make, cache: Cache, failing: list[Failing]) -> None:
    store, keys = make_store(disk=8), keys_of("a", 2)
    put(store, cache, keys)
    failing[0].fails["write"] = True
    for number in range(disk_tier.ERRORS_IN_A_ROW + 5):
        assert put(store, cache, keys_of(number, 1)) == [False]
    assert store.counters()["disk_errors"] == disk_tier.ERRORS_IN_A_ROW
    assert store.lookup(keys) == [None, None]
    assert store.take_changes() == {(Tier.DISK, key): False for key in keys}
    assert put(store, cache, keys) == [False, False]
    store.delete(keys)


def test_a_disk_without_room_at_the_start_is_gone_without(make_store: Make, cache: Cache, tmp_path: Path) -> None:
    store = make_store(disk=4)
    put(store, cache, keys_of("a", 4))
    store.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * slot_bytes(BLOCK_BYTES), hard))
    try:
        assert not make_store(disk=64).has_disk
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert blocks_file(tmp_path).stat().st_size == 4 * slot_bytes(BLOCK_BYTES)
    assert got(make_store(disk=4), cache, keys_of("a", 4)) == [True] * 4


@pytest.mark.slow
def test_over_nixl_blocks_come_back(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(host=4, disk=32, use_nixl=True), keys_of("a", 20)
    assert store._disk is not None
    assert type(store._disk._file).__name__ == "NixlFile"
    put(store, cache, keys)
    store.drain(60)
    assert got(store, cache, keys) == [True] * 20
    store.close()
    assert got(make_store(disk=32), cache, keys) == [True] * 20


def test_without_the_plugin_the_systems_calls_do(make_store: Make, cache: Cache, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transfer.store.nixl_file", None)
    store, keys = make_store(disk=8, use_nixl=True), keys_of("a", 2)
    put(store, cache, keys)
    assert got(store, cache, keys) == [True, True]


@pytest.mark.slow
def test_where_nixl_does_not_end_the_system_reads(make_store: Make, cache: Cache, monkeypatch: Any) -> None:
    store, keys = make_store(disk=8, use_nixl=True), keys_of("a", 4)
    put(store, cache, keys)
    assert store._disk is not None
    hangs: Any = store._disk._file
    monkeypatch.setattr(nixl_file, "LONGEST_S", 0.0)
    monkeypatch.setattr(hangs._agent, "transfer", lambda handle: "PROC")
    monkeypatch.setattr(hangs._agent, "check_xfer_state", lambda handle: "PROC")
    assert got(store, cache, keys) == [True] * 4
    assert isinstance(store._disk._file, SystemFile)
    assert store.counters()["disk_errors"] == 1
