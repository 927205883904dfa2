"""When cyclic garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from deployments.host.garbage import Collector, starting


@pytest.fixture(autouse=True)
def automatic() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


class Loop:
    def __init__(self) -> None:
        self.me = self


def test_garbage_goes_when_it_is_time_and_not_before() -> None:
    gc.collect()
    collector = Collector(every_s=5.0)
    assert not gc.isenabled()
    assert not collector.tick(100.0)
    gone = weakref.ref(Loop())
    assert not collector.tick(104.9)
    assert gone() is not None
    assert collector.tick(105.0)
    assert gone() is None
    assert not collector.tick(109.9)
    assert collector.tick(110.0)


def test_garbage_goes_when_there_is_much_of_it() -> None:
    gc.collect()
    collector = Collector(every_s=1e9, most_new=1000)
    assert not collector.tick(0.0)
    gone = [weakref.ref(Loop()) for _ in range(600)]  # an object and its dict each
    assert collector.tick(0.0)
    assert not any(each() for each in gone)
    assert not collector.tick(0.0)


def test_what_a_process_starts_with_is_never_looked_at_again() -> None:
    gc.unfreeze()
    with starting():
        assert not gc.isenabled()
        gone, kept = weakref.ref(Loop()), Loop()
        assert gone() is not None
    assert gone() is None, "garbage of the start is not kept"
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    stays = weakref.ref(kept)
    del kept
    gc.collect()
    assert stays() is not None


def test_a_start_that_fails_leaves_collection_on() -> None:
    with pytest.raises(RuntimeError), starting():
        raise RuntimeError
    assert gc.isenabled()
    Collector()
    with starting():
        pass
    assert not gc.isenabled(), "and off where it was off"
