"""What an engine keeps in its tiers and loads from them, over real memory and no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tests.transfer.store.test_worker import Lent
from transfer.store.block_store import BlockStore
from transfer.store.ledger import Tier
from transfer.vllm import tiers
from transfer.vllm.tier_events import tier_events
from transfer.vllm.tiers import Tiers, open_tiers
from transfer.vllm.worker_side import kv_layout

BLOCKS, HEADS, TOKENS, CONTENT = 32, 2, 4, 8
WAIT_S = 60.0
SETTINGS = {"host_bytes": 1 << 20, "disk_path": None}


class Engine:
    """KV caches and tiers under them."""

    def __init__(self, settings: dict[str, Any] | None, weights: str = "w") -> None:
        self.caches = [torch.rand(BLOCKS, HEADS, TOKENS, CONTENT) for _ in range(3)]
        layout = kv_layout(self.caches, TOKENS, {"model": "m"}, 0, 1, HEADS)
        self.news = threading.Event()
        opened = open_tiers(settings, layout, self.caches, lambda: weights)
        assert opened is not None
        self.tiers: Tiers = opened
        self.tiers.on_news(self.news.set)

    def keep(self, names: list[bytes]) -> None:
        """Store the engine's first blocks under these names, and wait until they are."""
        lent = Lent()
        lent.blocks = {name: block for block, name in enumerate(names)}
        self.tiers.keep(names, lent)
        self.until(lambda: self.tiers.leading(names) == len(names))

    def load(self, request_id: str, names: list[bytes], blocks: list[int]) -> int:
        taken: dict[str, int] = {}

        def is_loaded() -> bool:
            taken.update(self.tiers.take_loaded())
            return request_id in taken

        self.tiers.load(request_id, names, blocks)
        self.until(is_loaded)
        return taken[request_id]

    def until(self, is_so: Callable[[], bool]) -> None:
        while True:
            self.news.clear()
            if is_so():
                return
            assert self.news.wait(WAIT_S)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(SETTINGS)
    yield made
    made.tiers.close()


def named(count: int) -> list[bytes]:
    return [bytes([1 + number]) * 32 for number in range(count)]


def test_what_an_ended_request_left_is_loaded_into_other_blocks(engine: Engine) -> None:
    engine.keep(named(3))
    assert engine.load("r", named(3), [20, 21, 22]) == 3
    assert all(torch.equal(cache[20:23], cache[:3]) for cache in engine.caches)
    counted = engine.tiers.counters()
    assert (counted["tier_host_stored"], counted["tier_host_hits"]) == (3, 3)


def test_the_blocks_before_the_first_that_is_gone_count(engine: Engine) -> None:
    engine.keep(named(2))
    assert engine.tiers.leading([*named(2), b"?" * 32]) == 2
    assert engine.tiers.leading([b"?" * 32, *named(2)]) == 0
    assert engine.load("r", [named(2)[0], b"?" * 32, named(2)[1]], [20, 21, 22]) == 1


def test_a_tier_on_disk_has_them_after_a_restart(tmp_path: Path) -> None:
    settings = {"host_bytes": 0, "disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    first = Engine(settings)
    first.keep(named(3))
    kept = [cache[:3].clone() for cache in first.caches]
    first.tiers.close()
    second = Engine(settings)
    try:
        assert second.load("r", named(3), [20, 21, 22]) == 3
        assert all(torch.equal(cache[20:23], before) for cache, before in zip(second.caches, kept, strict=True))
    finally:
        second.tiers.close()


def test_a_tier_on_disk_of_other_weights_has_nothing(tmp_path: Path) -> None:
    settings = {"host_bytes": 0, "disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    first = Engine(settings)
    first.keep(named(3))
    first.tiers.close()
    second = Engine(settings, weights="others")
    try:
        assert second.tiers.leading(named(3)) == 0
    finally:
        second.tiers.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread dies on purpose
def test_an_engine_goes_on_when_the_thread_of_the_store_dies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.keep(named(3))
    engine.tiers.take_loaded()
    engine.tiers.take_changes()

    def die(*_: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(BlockStore, "load", die)
        assert engine.load("r", named(3), [20, 21, 22]) == 0
    assert engine.tiers.leading(named(3)) == 0
    assert engine.tiers.take_changes() == {(Tier.HOST, name): False for name in named(3)}
    engine.tiers.keep(named(3), Lent())
    assert engine.load("later", named(3), [20, 21, 22]) == 0


def test_a_request_waits_for_a_load_no_longer_than_that(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.keep(named(3))
    hangs, goes_on = threading.Event(), threading.Event()
    load = BlockStore.load

    def hanging(*arguments: Any) -> list[bool]:
        hangs.set()
        assert goes_on.wait(WAIT_S)
        return load(*arguments)

    monkeypatch.setattr(BlockStore, "load", hanging)
    monkeypatch.setattr(tiers, "LOAD_WAIT_S", 0.0)
    engine.tiers.load("r", named(3), [20, 21, 22])
    assert hangs.wait(WAIT_S)
    assert engine.tiers.take_loaded() == {"r": 0}
    before = [cache.clone() for cache in engine.caches]
    goes_on.set()
    engine.until(lambda: engine.tiers.counters()["tier_open_jobs"] == 0)
    assert engine.tiers.take_loaded() == {}, "its result comes too late"
    assert all(torch.equal(cache, kept) for cache, kept in zip(engine.caches, before, strict=True))


def test_its_changes_are_events_by_the_names_that_vllm_gives_its_blocks(engine: Engine) -> None:
    engine.keep(named(2))
    engine.tiers.take_loaded()
    names = [maybe_convert_block_hash(BlockHash(name)) for name in named(2)]
    (come,) = tier_events(engine.tiers.take_changes(), TOKENS)
    assert come == BlockStored(names, None, [], TOKENS, None, "CPU", None)
    assert tier_events(engine.tiers.take_changes(), TOKENS) == []
    changes = {(Tier.DISK, named(2)[0]): False, (Tier.HOST, named(2)[1]): False, (Tier.DISK, named(2)[1]): True}
    assert tier_events(changes, TOKENS) == [
        BlockRemoved([names[1]], "CPU"),
        BlockRemoved([names[0]], "STORAGE"),
        BlockStored([names[1]], None, [], TOKENS, None, "STORAGE", None),
    ]


def test_there_are_none_without_settings() -> None:
    caches = [torch.rand(BLOCKS, HEADS, TOKENS, CONTENT)]
    assert open_tiers(None, kv_layout(caches, TOKENS, {}, 0, 1, HEADS), caches, lambda: "w") is None
