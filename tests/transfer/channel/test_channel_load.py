"""The channel under load and under fire."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from transfer.channel.channel import ChannelError
from transfer.channel.layers import Chunk
from transfer.control.messages import MAX_BYTES, FirstToken, Seal
from transfer.control.token_sender import TokenSender
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.plane import WriteState

PROMPTS, TOKEN = (1, 3, 4, 5, 11, 16), 42


class SlowPlane(InProcessPlane):
    """Completes writes only when it is told to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate = threading.Event()

    def check(self, handle: Any) -> WriteState:
        return handle if self.gate.is_set() else WriteState.BUSY


def test_quiet_means_no_write_reads_these_blocks(decode: Any, make_side: Callable[..., Any]) -> None:
    plane = SlowPlane("slow")
    prefill = make_side("prefill", plane=plane)
    decode.channel.offer(("s", 1), "d", [prefill.channel.address], 0, [1, 2], False)
    prefill.until(lambda: prefill.counter("open_writing"))
    prefill.save(("s", 1), "p", 8, 8, [3, 4])
    prefill.until(lambda: len(prefill.channel._prefill.writes.in_flight) == prefill.layers)
    assert not prefill.channel.wait_quiet([("s", 1)], 0.05)
    assert prefill.channel.wait_quiet([("other", 1)], 10)
    plane.gate.set()
    assert prefill.channel.wait_quiet([("s", 1)], 10)
    assert decode.wait("received", "d") is None


class Computing:
    """A layer that a device has yet to compute: the event that is recorded behind it."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        assert self.done.wait(60)


def test_a_layer_goes_when_it_is_computed_and_does_not_wait_for_the_next(prefill: Any, decode: Any) -> None:
    prefill.fill([3, 4], 1)
    layers = [Computing() for _ in range(prefill.layers)]
    decode.channel.offer(("s", 1), "d", [prefill.channel.address], 0, [1, 2], False)
    prefill.channel.begin_step([Chunk(("s", 1), "p", 8, 8, (3, 4))])
    for layer, computing in enumerate(layers):
        prefill.channel.layer_saved(layer, computing)
    prefill.channel.end_step()
    assert not prefill.counter("writes")
    for written, computing in enumerate(layers, 1):
        computing.done.set()
        prefill.wait_counter("writes", written)
        decode.channel.offer((f"other {written}", 1), "o", [prefill.channel.address], 0, [5], False)
        prefill.until(lambda written=written: prefill.channel.is_answered((f"other {written}", 1)))
    assert decode.wait("received", "d") is None
    assert np.array_equal(decode.memory[:, :, [1, 2]], prefill.memory[:, :, [3, 4]])


def test_a_write_that_takes_long_wakes_the_other_side(decode: Any, make_side: Callable[..., Any]) -> None:
    plane = SlowPlane("slow")
    prefill = make_side("prefill", plane=plane)
    decode.channel.meet([[prefill.channel.address]])
    prefill.until(lambda: prefill.channel._prefill.peers.agents)
    decode.channel._decode._active_until = 0.0
    decode.channel.offer(("s", 1), "d", [prefill.channel.address], 0, [1, 2], False)
    prefill.save(("s", 1), "p", 8, 8, [3, 4])
    decode.until(lambda: decode.channel._decode.is_active(time.monotonic()))
    plane.gate.set()
    assert decode.wait("received", "d") is None


def test_a_cancel_is_answered_only_when_writes_are_done(decode: Any, make_side: Callable[..., Any]) -> None:
    plane = SlowPlane("slow")
    prefill = make_side("prefill", plane=plane)
    decode.channel.offer(("s", 1), "d", [prefill.channel.address], 0, [1, 2], False)
    prefill.save(("s", 1), "p", 8, 8, [3, 4])
    prefill.until(lambda: prefill.channel._prefill.writes.in_flight)
    decode.channel.cancel(("s", 1), "aborted")
    prefill.channel.ended(("s", 1), "p", False)
    prefill.barrier()
    decode.barrier()
    assert not decode.collect().broken, "free while a write is under way"
    assert not prefill.collect().released
    plane.gate.set()
    assert decode.wait("broken", "d") == "aborted"
    assert prefill.wait("released", "p")


def test_garbage_is_counted_and_harmless(prefill: Any, decode: Any) -> None:
    generator = random.Random(7)
    right = Seal("a secret of the tests")
    frames = [generator.randbytes(generator.randint(0, 300)) for _ in range(50)]
    frames += [Seal("wrong").pack(FirstToken("s", 1, 2)), right.pack(FirstToken("s", 1, 2))[:-1]]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(prefill.channel.address)
        stranger.setsockopt(zmq.LINGER, 0)
        for frame in frames:
            stranger.send_multipart([b"", frame])
        prefill.wait_counter("bad_messages", len(frames))
        stranger.send(bytes(MAX_BYTES + 1))  # libzmq drops the connection
    host, _, port = prefill.channel.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    decode.channel.offer(("s", 1), "d", [prefill.channel.address], 0, [1], False)
    prefill.save(("s", 1), "p", 4, 4, [2])
    assert decode.wait("received", "d") is None
    assert prefill.counter("bad_messages") == len(frames)


class Traffic:
    """Random handoffs between two sides, some of them cancelled or aborted at random moments."""

    def __init__(self, prefill: Any, decode: Any, seed: int) -> None:
        self.prefill, self.decode, self.random = prefill, decode, random.Random(seed)
        self.sender = TokenSender(decode.seal)
        self.free = {side: list(range(side.blocks)) for side in (prefill, decode)}
        self.held: dict[tuple[Any, str], list[int]] = {}
        self.cancelled: set[str] = set()
        self.intact = 0

    def take(self, side: Any, name: str, count: int) -> list[int]:
        free = self.free[side]

        def enough() -> bool:
            self.settle()
            return len(free) >= count

        side.until(enough)
        self.random.shuffle(free)
        self.held[side, name] = [free.pop() for _ in range(count)]
        return self.held[side, name]

    def settle(self) -> None:
        """Take results: check what arrived, and give blocks back."""
        decode, prefill = self.decode, self.prefill
        arrived = {name for side, name in self.held if side is decode} & decode.collect().received.keys()
        for name in arrived:
            target, seed = self.held[decode, name], int(name)
            expected = np.random.default_rng(seed).integers(
                1, 256, (*prefill.memory.shape[:2], len(target), prefill.memory.shape[3]), dtype=np.uint8
            )
            assert np.array_equal(decode.memory[:, :, target], expected)
            assert decode.results.received[name] == TOKEN + seed
            self.intact += 1
        for side, ended in (
            (decode, decode.results.received.keys() | decode.results.broken.keys()),
            (prefill, prefill.collect().released),
        ):
            for name in ended:
                self.free[side] += self.held.pop((side, name), [])

    def events(self, name: str) -> list[Callable[[], None]]:
        """One handoff's events, in an order that could be."""
        key, prompt = (name, 1), self.random.choice(PROMPTS)
        count = -(-prompt // self.prefill.block_size)
        source, target = self.take(self.prefill, name, count), self.take(self.decode, name, count)
        self.prefill.fill(source, int(name))
        is_aborted = prompt > 1 and self.random.random() < 0.2
        address, cut = self.prefill.channel.address, self.random.randint(1, max(1, prompt - is_aborted))
        token = FirstToken(*key, TOKEN + int(name))
        events: list[Callable[[], None]] = [
            lambda: self.prefill.save(key, name, cut, prompt, source),
            lambda: self.prefill.save(key, name, prompt, prompt, source),
            lambda: self.sender.send(self.decode.channel.address, token),
            lambda: self.prefill.channel.ended(key, name, True),
        ]
        if is_aborted:
            del events[self.random.randint(0, 1) :]
            events.append(lambda: self.prefill.channel.ended(key, name, False))
        position = self.random.randint(0, len(events))
        offer = lambda: self.decode.channel.offer(key, name, [address], 0, target, True)  # noqa: E731
        events.insert(position, offer)
        if self.random.random() < 0.3:
            self.cancelled.add(name)
            cancel = lambda: self.decode.channel.cancel(key, "aborted")  # noqa: E731
            events.insert(self.random.randint(position + 1, len(events)), cancel)
        return events

    def run(self, handoffs: int, at_once: int) -> None:
        names = [str(number) for number in range(handoffs)]
        active: list[list[Any]] = []
        while names or active:
            if names and len(active) < at_once:
                active.append(self.events(names.pop()))
            events = self.random.choice(active)
            events.pop(0)()
            if not events:
                active.remove(events)

        def all_is_back() -> bool:
            self.settle()
            return not self.held

        self.decode.until(all_is_back)
        self.sender.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_300_random_handoffs_with_random_cancels(prefill: Any, decode: Any, seed: int) -> None:
    traffic = Traffic(prefill, decode, seed)
    traffic.run(300, at_once=6)
    received, broken = decode.results.received.keys(), decode.results.broken.keys()
    assert len(received) + len(broken) == 300
    assert traffic.intact == len(received) > 100
    assert broken > (traffic.cancelled - received)
    assert len(prefill.results.released) == 300
    assert all(len(free) == decode.blocks for free in traffic.free.values())
    prefill.wait_idle()
    decode.wait_idle()
    assert prefill.counter("bad_messages") == decode.counter("bad_messages") == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_the_thread_is_an_error_of_the_engine(prefill: Any) -> None:
    prefill.channel.ended(("s", 1), "p", True)
    prefill.channel.ended(("s", 1), "p", True)  # illegal
    prefill.channel._thread.join(60)
    with pytest.raises(ChannelError) as caught:
        prefill.channel.take_results()
    assert "ended twice" in str(caught.value.__cause__)
    assert not prefill.channel.wait_quiet([("s", 1)], 0.01)
