"""Two sides of a KV channel in one process, over real memory and real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from transfer.channel.channel import Channel
from transfer.channel.layers import Chunk
from transfer.channel.outbox import Key, Results
from transfer.channel.timings import TIMINGS, Timings
from transfer.control.messages import Seal
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.layout import KVLayout
from transfer.memory.plane import Plane

LAYERS, REGIONS, BLOCKS, BLOCK_SIZE, BLOCK_BYTES = 3, 2, 64, 4, 32
SECRET, WAIT_S = "a secret of the tests", 60.0


@pytest.fixture(autouse=True)
def _no_leaks(no_leaks: None) -> None:
    """Every test of this folder ends with what it began with."""


def until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Wait for a condition, not for a time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.001)
    return value


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    """`until(condition)` for tests."""
    return until


class Side:
    """One worker: memory, channel, and everything that its channel ever reported."""

    until = staticmethod(until)
    layers, blocks, block_size = LAYERS, BLOCKS, BLOCK_SIZE

    def __init__(
        self,
        name: str,
        plane: Plane | None = None,
        timeout_s: float = WAIT_S,
        secret: str = SECRET,
        fingerprint: str = "model",
        block_size: int = BLOCK_SIZE,
        rank: int = 0,
        workers: int = 1,
        stages: tuple[int, ...] = (),
        total_heads: int = 1,
        timings: Timings = TIMINGS,
    ) -> None:
        tensor = workers // max(1, len(stages))
        layers, block_bytes = stages[rank // tensor] if stages else LAYERS, BLOCK_BYTES // tensor
        self.memory = np.zeros((layers, REGIONS, BLOCKS, block_bytes), dtype=np.uint8)
        base, region = int(self.memory.ctypes.data), BLOCKS * block_bytes
        self.layout = KVLayout(
            num_layers=layers,
            regions_per_layer=REGIONS,
            num_blocks=BLOCKS,
            block_size=block_size,
            block_bytes=block_bytes,
            bases=tuple(base + index * region for index in range(layers * REGIONS)),
            facts={"fingerprint": fingerprint},
            rank=rank,
            workers=workers,
            stages=stages,
            total_heads=total_heads,
        )
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.seal = Seal(secret)
        self.channel = Channel(
            plane or InProcessPlane(f"{name}-{id(self)}"),
            self.layout,
            self.seal,
            "127.0.0.1",
            timeout_s,
            lambda event, **fields: self.events.append((event, fields)),
            timings=timings,
        )
        self.results = Results()

    def fill(self, blocks: list[int], seed: int) -> None:
        """Put bytes of their own into blocks."""
        shape = (LAYERS, REGIONS, len(blocks), BLOCK_BYTES)
        self.memory[:, :, blocks] = np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)

    def save(
        self, key: Key, request_id: str, computed: int, prompt: int, blocks: list[int], layers: int = LAYERS
    ) -> None:
        """One engine step: compute a chunk, layer by layer."""
        self.channel.begin_step([Chunk(key, request_id, computed, prompt, tuple(blocks))])
        for layer in range(layers):
            self.channel.layer_saved(layer)
        self.channel.end_step()

    def collect(self) -> Results:
        """All results so far; an id reported twice is an error."""
        new = self.channel.take_results()
        both: tuple[tuple[Any, Any], ...] = (
            (self.results.received, new.received),
            (self.results.broken, new.broken),
            (self.results.fetched, new.fetched),
        )
        for mine, more in both:
            assert not mine.keys() & more.keys()
            mine.update(more)
        for ours, more in ((self.results.released, new.released), (self.results.late, new.late)):
            assert not ours & more
            ours |= more
        return self.results

    def wait(self, kind: str, request_id: str) -> Any:
        """Wait for a result: received -> token, broken -> reason, fetched -> blocks, released, late -> True."""
        until(lambda: request_id in getattr(self.collect(), kind))
        found = getattr(self.results, kind)
        return True if isinstance(found, set) else found[request_id]

    def counter(self, name: str) -> float:
        return self.channel.counters()[name]

    def wait_counter(self, name: str, value: float) -> None:
        until(lambda: self.counter(name) == value)

    def wait_idle(self) -> None:
        """Wait until no handoff is open."""
        until(lambda: not self.counter("open_receiving") and not self.counter("open_writing"))

    def barrier(self) -> None:
        """Wait until the channel's thread has done all that it was told."""
        assert self.channel.wait_quiet([], WAIT_S)

    def run_out(self) -> None:
        """The channel's thread finds an hour later on its clock: all that is under way has run out of time."""

        def expire() -> None:
            for side in (self.channel._decode, self.channel._prefill):
                side.expire(time.monotonic() + 3600)

        self.channel._do(expire)


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    """Build sides; they are closed in reverse."""
    made: list[Side] = []

    def make(name: str, **options: Any) -> Side:
        made.append(Side(name, **options))
        return made[-1]

    yield make
    for side in reversed(made):
        side.channel.close()
    assert not [t for t in threading.enumerate() if t.name == "baton-channel"]


@pytest.fixture
def prefill(make_side: Callable[..., Side]) -> Side:
    return make_side("prefill")


@pytest.fixture
def decode(make_side: Callable[..., Side]) -> Side:
    return make_side("decode")
