"""The soak benchmark for some seconds: its figures are there, nothing goes wrong, and nothing is left."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest

from load_tests.bench.soak import Sample, Soak, growth, run
from load_tests.chaos.faults import OFTEN
from load_tests.chaos.mock import MUST_NOT
from load_tests.harness.control_plane import REPLICAS, config
from load_tests.harness.machine import heap_bytes

CONNECTIONS = 8
"""Descriptors of connections that a short warm-up on a busy machine may not have made yet."""


@pytest.fixture
def frozen() -> Iterator[None]:
    """The modules' objects, of which a test session has very many, are not looked through at each sample."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
async def test_a_short_soak_leaves_nothing(no_leaks: None, frozen: None) -> None:
    quick = config(max_attempts=8, queue_timeout_s=20.0)
    soak = Soak(
        2.0,
        6,
        samples=3,
        pause_s=0.2,
        warm_up_s=0.5,
        settle_s=60.0,
        questions=6,
        kinds=OFTEN,
        replica_ids=tuple(REPLICAS),
        config=quick,
    )
    result = await run(soak)
    assert result["sessions"] >= 6
    assert result["faults"] >= 1
    assert not [name for name in MUST_NOT if result[name]]
    more = result["leaked"]
    assert more.pop("descriptors", 0) <= CONNECTIONS
    assert more == {}
    assert result["objects_growth_share"] < 0.5
    assert result["heap_mib_growth_share"] < 0.5


def test_growth_is_what_comes_after_the_warm_up() -> None:
    warming = [Sample(float(number), 100.0 + number, 10.0, 1000) for number in range(30)]
    flat = [Sample(30.0 + number, 130.0, 10.0, 1000) for number in range(60)]
    found = growth([*warming, *flat], "rss_mib")
    assert (found["rss_mib_start"], found["rss_mib_end"], found["rss_mib_growth"]) == (100.0, 130.0, 0.0)
    assert abs(found["rss_mib_per_hour"]) < 0.1
    growing = [Sample(float(number), 100.0 + number, 10.0, 1000) for number in range(90)]
    assert growth(growing, "rss_mib")["rss_mib_growth"] == 30.0
    assert growth(growing, "rss_mib")["rss_mib_per_hour"] == 3600.0


def test_the_heap_holds_what_was_asked_of_it() -> None:
    buffer = ctypes.CDLL(None).malloc
    buffer.restype, buffer.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    before = heap_bytes()
    taken = [buffer(64 << 10) for _ in range(256)]
    grown = heap_bytes() - before
    for each in taken:
        free(each)
    assert 16 << 20 <= grown < 20 << 20
    assert heap_bytes() - before < 4 << 20
