"""What workers in other processes borrow: here both sides are in one process, with a socket between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from transfer.vllm import remote_library
from transfer.vllm.remote_library import LibraryServer, RemoteLibrary

SECRET = b"secret"


class Shelf:
    """Has the blocks 1 to 9, each named by its number."""

    def __init__(self) -> None:
        self.lent: list[int] = []
        self.holds_up = threading.Event()
        self.holds_up.set()

    def borrow(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        self.holds_up.wait(60.0)
        found = [name[0] for name in hashes if name[0] < 10]
        self.lent += found
        return tuple(found)

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.lent.remove(block)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def server(shelf: Shelf) -> Iterator[LibraryServer]:
    made = LibraryServer(SECRET)
    made.library = shelf
    yield made
    made.close()


@pytest.fixture
def worker(server: LibraryServer, until: Callable[..., object]) -> Iterator[Callable[..., RemoteLibrary]]:
    made: list[RemoteLibrary] = []

    def make(recall: Callable[[], object] = lambda: None) -> RemoteLibrary:
        made.append(RemoteLibrary(server.address, SECRET, recall))
        until(lambda: made[-1]._calls is not None)
        return made[-1]

    yield make
    for each in made:
        each.close()


def names(*blocks: int) -> list[bytes]:
    return [bytes([block]) for block in blocks]


def test_workers_borrow_and_give_back(
    shelf: Shelf, worker: Callable[..., RemoteLibrary], until: Callable[..., object]
) -> None:
    one, two = worker(), worker()
    assert one.borrow(names(3, 4, 20)) == (3, 4)
    assert two.borrow(names(4)) == (4,)
    assert sorted(shelf.lent) == [3, 4, 4]
    assert one.borrow(names(20)) == ()
    assert one.borrow([]) == ()
    one.give_back((3, 4))
    until(lambda: shelf.lent == [4])
    two.give_back((4,))
    until(lambda: not shelf.lent)


def test_what_a_worker_borrowed_comes_back_when_it_dies(
    shelf: Shelf, worker: Callable[..., RemoteLibrary], until: Callable[..., object]
) -> None:
    one, two = worker(), worker()
    one.borrow(names(1, 2, 3))
    one.give_back((2,))
    two.borrow(names(1))
    one.close()
    until(lambda: shelf.lent == [1])
    assert one.borrow(names(1)) == ()
    assert two.borrow(names(5)) == (5,)


def test_every_worker_is_told_to_end_its_fetches(
    server: LibraryServer, worker: Callable[..., RemoteLibrary], until: Callable[..., object]
) -> None:
    told = [threading.Event(), threading.Event()]
    workers = [worker(each.set) for each in told]
    for each in workers:
        each.borrow(names(1))  # both connections are open
    until(lambda: server.recall() and all(each.is_set() for each in told))
    workers[0].close()
    told[1].clear()
    until(lambda: server.recall() and told[1].is_set())


def test_what_the_scheduler_lends_too_late_goes_back_and_what_was_lent_before_stays(
    shelf: Shelf,
    worker: Callable[..., RemoteLibrary],
    until: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asks = worker()
    assert asks.borrow(names(7)) == (7,)
    monkeypatch.setattr(remote_library, "ANSWER_S", 0.05)
    monkeypatch.setattr(remote_library, "GRACE_S", 0.05)
    shelf.holds_up.clear()
    assert asks.borrow(names(1, 2)) == ()
    assert asks.borrow(names(3)) == (), "the first answer is still owed"
    monkeypatch.undo()
    shelf.holds_up.set()
    until(lambda: asks.borrow(names(4)) == (4,))
    until(lambda: sorted(shelf.lent) == [4, 7])


def test_a_stranger_borrows_nothing_and_others_go_on(
    server: LibraryServer, worker: Callable[..., RemoteLibrary]
) -> None:
    stranger = RemoteLibrary(server.address, b"another", lambda: None)
    assert worker().borrow(names(1)) == (1,)
    assert stranger.borrow(names(1)) == ()
    stranger.close()


def test_it_ends_with_its_threads(shelf: Shelf, until: Callable[..., object]) -> None:
    before = threading.active_count()
    server = LibraryServer(SECRET)
    server.library = shelf
    asks = RemoteLibrary(server.address, SECRET, lambda: None)
    until(lambda: asks.borrow(names(1)) == (1,))
    server.close()
    until(lambda: threading.active_count() == before and not shelf.lent)
    assert asks.borrow(names(1)) == ()
    asks.close()
