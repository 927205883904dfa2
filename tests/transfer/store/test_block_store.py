"""Store, load, look up and delete: where blocks are, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transfer.store.conftest import BLOCK_BYTES, Cache, keys_of
from transfer.store.block_memory import HostMemory
from transfer.store.block_store import BlockStore
from transfer.store.config import StoreConfig
from transfer.store.ledger import Tier
from transfer.store.refs import chain

Make = Callable[..., BlockStore]


def put(store: BlockStore, cache: Cache, keys: list[bytes]) -> list[bool]:
    """Store the blocks of a prompt, from the memory's first blocks."""
    for block, key in enumerate(keys):
        cache.write(block, key)
    done = store.store(chain(keys), range(len(keys)))
    cache.wipe()
    return done


def got(store: BlockStore, cache: Cache, keys: list[bytes]) -> list[bool]:
    """Load keys into blocks from 20 on. What is loaded is right, and the other blocks stay as they were."""
    done = store.load(keys, range(20, 20 + len(keys)))
    for block, key, is_loaded in zip(range(20, 20 + len(keys)), keys, done, strict=True):
        assert cache.has(block, key) if is_loaded else not cache.array[:, :, block].any()
    cache.wipe()
    return done


@pytest.mark.parametrize(("host", "disk"), [(32, 0), (0, 32), (8, 32), (32, 32)])
def test_what_is_stored_is_loaded(make_store: Make, cache: Cache, host: int, disk: int) -> None:
    store, keys = make_store(host, disk), keys_of("a", 20)
    assert got(store, cache, keys) == [False] * 20
    assert put(store, cache, keys) == [True] * 20
    assert got(store, cache, keys) == [True] * 20
    assert got(store, cache, [*keys_of("b", 2), keys[7], keys[7]]) == [False, False, True, True]
    counters = store.counters()
    assert counters["loaded_bytes"] == 22 * BLOCK_BYTES
    assert (counters["host_hits"] + counters["disk_hits"], counters["misses"]) == (22, 22)
    assert counters["stored_bytes"] == 20 * BLOCK_BYTES


def test_lookup_names_the_fastest_tier(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(host=2, disk=8), keys_of("a", 4)
    put(store, cache, keys)
    assert store.lookup([*keys, *keys_of("b", 1)]) == [Tier.HOST, Tier.HOST, Tier.DISK, Tier.DISK, None]


def test_a_block_that_is_stored_twice_is_there_once(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(host=8, disk=8), keys_of("a", 1)
    for block in (0, 1):
        cache.write(block, keys[0])
    assert store.store([*chain(keys), *chain(keys)], [0, 1]) == [True, True]
    assert store.counters()["host_stored"] == 1


def test_what_is_evicted_from_host_goes_down(make_store: Make, cache: Cache) -> None:
    store, old, new = make_store(host=2, disk=8), keys_of("old", 2), keys_of("new", 2)
    put(store, cache, old)
    store.touch(new * 2)
    put(store, cache, new)
    assert store.lookup([*old, *new]) == [Tier.DISK, Tier.DISK, Tier.HOST, Tier.HOST]
    assert got(store, cache, old) == [True, True]


def test_without_a_disk_what_is_evicted_is_gone(make_store: Make, cache: Cache) -> None:
    store, old, new = make_store(host=2), keys_of("old", 2), keys_of("new", 2)
    put(store, cache, old)
    assert put(store, cache, new) == [False, False]  # used as often as the old ones
    store.touch(new)
    assert put(store, cache, new) == [True, True]
    assert store.lookup([*old, *new]) == [None, None, Tier.HOST, Tier.HOST]


def test_a_prompt_is_stored_up_to_the_first_block_that_is_not_admitted(make_store: Make, cache: Cache) -> None:
    store = make_store(host=12)
    assert put(store, cache, keys_of("a", 20)) == [True] * 12 + [False] * 8
    assert store.counters()["not_admitted"] == 8


def test_what_is_loaded_from_disk_may_come_up(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(host=2, disk=8), keys_of("a", 4)
    put(store, cache, keys)
    store.promote(keys)
    assert store.lookup(keys[2:]) == [Tier.DISK, Tier.DISK]  # used as often as what is there
    for _ in range(3):
        assert got(store, cache, keys[2:]) == [True, True]
    store.promote(keys[2:])
    assert Tier.HOST in store.lookup(keys[2:])
    assert got(store, cache, keys) == [True] * 4


def test_delete_forgets_in_every_tier_and_after_a_restart(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(host=2, disk=8), keys_of("a", 4)
    put(store, cache, keys)
    store.drain(60)
    store.delete([keys[0], keys[3], *keys_of("b", 1)])
    assert store.lookup(keys) == [None, Tier.HOST, Tier.DISK, None]
    store.close()
    assert make_store(disk=8).lookup(keys) == [None, Tier.DISK, Tier.DISK, None]


def test_drain_brings_the_host_tier_down(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(host=20, disk=20), keys_of("a", 20)
    put(store, cache, keys)
    store.drain(0)
    assert store.counters()["disk_stored"] == 0
    store.drain(60)
    store.close()
    assert got(make_store(disk=20), cache, keys) == [True] * 20


def test_changes_say_what_came_and_went(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(host=1, disk=8), keys_of("a", 2)
    put(store, cache, keys)
    assert store.take_changes() == {(Tier.HOST, keys[0]): True, (Tier.DISK, keys[1]): True}
    store.delete(keys)
    assert store.take_changes() == {(Tier.HOST, keys[0]): False, (Tier.DISK, keys[1]): False}
    assert store.take_changes() == {}
    put(store, cache, keys)
    store.close()
    assert make_store(disk=8).take_changes() == {(Tier.DISK, keys[1]): True}


def test_another_fingerprint_finds_nothing(make_store: Make, cache: Cache) -> None:
    store, keys = make_store(disk=8), keys_of("a", 2)
    put(store, cache, keys)
    store.close()
    assert make_store(disk=8, fingerprint="other").lookup(keys) == [None, None]


def test_two_stores_do_not_share_a_segment(make_store: Make, cache: Cache, tmp_path: Path) -> None:
    first, second = make_store(disk=8), make_store(disk=8)
    put(first, cache, keys_of("a", 2))
    assert second.lookup(keys_of("a", 2)) == [None, None]
    assert len(list(tmp_path.glob("*/*.index"))) == 2


def test_a_disk_tier_that_cannot_be_opened_is_gone_without(make_store: Make, cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "baton-kv").write_text("no folder")
    store, keys = make_store(host=4, disk=8), keys_of("a", 2)
    assert not store.has_disk
    assert store.counters()["disk_errors"] == 1
    put(store, cache, keys)
    assert got(store, cache, keys) == [True, True]


def test_a_closed_store_has_given_its_memory_back(cache: Cache) -> None:
    def sizes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    before, config = sizes(), StoreConfig("model", host_bytes=1 << 30)
    stores = [BlockStore(cache.memory, config) for _ in range(4)]
    assert sizes() - before > 4_000_000_000
    for store in stores:
        store.close()
        store.close()
    assert sizes() - before < 1_000_000_000


class Breaks(HostMemory):
    """Memory whose device fails."""

    is_broken = True

    def gather(self, blocks: object, into: object) -> None:
        if self.is_broken:
            raise RuntimeError("the device is gone")
        super().gather(blocks, into)  # type: ignore[arg-type]  # passed on as it came


def test_a_device_that_fails_loses_no_slot(cache: Cache) -> None:
    memory, keys = Breaks(cache.layout), keys_of("a", 4)
    store = BlockStore(memory, StoreConfig("model", 4 * BLOCK_BYTES))
    with pytest.raises(RuntimeError, match="the device is gone"):
        store.store(chain(keys), range(4))
    assert store.lookup(keys) == [None] * 4
    memory.is_broken = False
    assert put(store, cache, keys) == [True] * 4
    store.close()
