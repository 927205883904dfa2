"""What a scheduler knows of the tiers of workers in other processes. Here all are in one, with sockets between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.transfer.vllm.test_remote_library import SECRET
from tests.transfer.vllm.test_tiers import SETTINGS, Engine, named
from transfer.store.ledger import Tier
from transfer.vllm.remote_library import LibraryServer, RemoteLibrary
from transfer.vllm.shared_tiers import SharedTiers
from transfer.vllm.tier_news import TierNews

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
HOST_A, HOST_B, DISK_B = (Tier.HOST, A), (Tier.HOST, B), (Tier.DISK, B)


class Named:
    """The scheduler's prefix cache: it has a block for each name, until it is told otherwise."""

    def __init__(self, names: Sequence[bytes]) -> None:
        self.blocks, self.lent = {name: block for block, name in enumerate(names)}, list[int]()

    def borrow(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        found = [self.blocks[name] for name in hashes if name in self.blocks]
        self.lent += found
        return tuple(found)

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.lent.remove(block)


def test_a_block_can_be_loaded_where_all_workers_have_it() -> None:
    shared = SharedTiers(2)
    shared.changed(0, {HOST_A: True, HOST_B: True})
    assert (shared.leading([A, B]), shared.take_changes()) == (0, {})
    shared.changed(1, {HOST_A: True})
    assert (shared.leading([A, B]), shared.leading([B, A])) == (1, 0)
    assert shared.take_changes() == {HOST_A: True}
    shared.changed(1, {DISK_B: True})
    assert shared.leading([A, B, C]) == 2, "one has it in another tier"
    assert shared.take_changes() == {}
    shared.changed(0, {HOST_A: False})
    assert shared.leading([A, B]) == 0
    assert shared.take_changes() == {HOST_A: False}


def test_what_has_come_and_gone_between_two_looks_is_told_as_it_is_now() -> None:
    shared = SharedTiers(1)
    shared.changed(0, {HOST_A: True})
    shared.changed(0, {HOST_A: False})
    assert shared.take_changes() == {HOST_A: False}
    shared.changed(0, {HOST_A: False})
    assert shared.take_changes() == {}


def test_of_a_worker_that_is_lost_nothing_can_be_loaded() -> None:
    shared = SharedTiers(2)
    for rank in (0, 1):
        shared.changed(rank, {HOST_A: True})
    shared.take_changes()
    shared.lost(1)
    assert shared.leading([A]) == 0
    assert shared.take_changes() == {HOST_A: False}
    shared.lost(0)
    assert not shared._ranks, "and nothing is left of them"


@pytest.fixture
def shared() -> SharedTiers:
    return SharedTiers(2)


@pytest.fixture
def cache() -> Named:
    return Named(named(3))


@pytest.fixture
def server(shared: SharedTiers, cache: Named) -> Iterator[LibraryServer]:
    made = LibraryServer(SECRET, shared)
    made.library = cache
    yield made
    made.close()


@pytest.fixture
def workers(server: LibraryServer) -> Iterator[list[tuple[Engine, TierNews]]]:
    made = []
    for rank in (0, 1):
        engine = Engine(SETTINGS)
        made.append((engine, TierNews(server.address, SECRET, rank, engine.tiers)))
    yield made
    for engine, news in made:
        news.close()
        engine.tiers.close()


def test_workers_store_what_they_borrow_and_the_scheduler_hears_of_it_without_a_step(
    shared: SharedTiers,
    cache: Named,
    server: LibraryServer,
    workers: list[tuple[Engine, TierNews]],
    until: Callable[..., object],
) -> None:
    shared.keep(named(3), cache)
    assert shared.has_kept
    (kept,) = shared.take_kept()
    assert not shared.has_kept
    lenders = [RemoteLibrary(server.address, SECRET, lambda: None) for _ in workers]
    until(lambda: all(each._calls is not None for each in lenders))
    (first, _), (second, news) = workers
    first.tiers.keep(kept, lenders[0])
    until(lambda: first.tiers.leading(kept) == 3)
    assert shared.leading(kept) == 0, "the other worker has nothing yet"
    second.tiers.keep(kept, lenders[1])
    until(lambda: shared.leading(kept) == 3)
    assert shared.take_changes() == {(Tier.HOST, name): True for name in kept}
    until(lambda: not cache.lent)
    news.close()
    until(lambda: shared.leading(kept) == 0)
    for each in lenders:
        each.close()


def test_a_worker_with_another_secret_is_not_heard(
    shared: SharedTiers, server: LibraryServer, until: Callable[..., object]
) -> None:
    before = threading.active_count()
    engine = Engine(SETTINGS)
    engine.keep(named(2))
    news = TierNews(server.address, b"another", 0, engine.tiers)
    until(lambda: threading.active_count() == before + 1)  # the store's thread; the other one has given up
    assert shared.leading(named(2)) == 0
    news.close()
    engine.tiers.close()
