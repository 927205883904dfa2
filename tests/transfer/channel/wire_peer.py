"""Peers with the right secret that send what they should not."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import zmq

from transfer.control import messages as control
from transfer.control.messages import Hello, Offer, Seal
from transfer.control.seal import DIGEST_BYTES
from transfer.memory.in_process_plane import InProcessPlane
from transfer.memory.layout import KVLayout

SECRET = "a secret of the tests"
KEY = ("session", 1)
BLOCKS, BLOCK_BYTES, GUARD = 64, 32, 4096


def sealed(body: bytes) -> bytes:
    """Any bytes under a right seal."""
    key = hashlib.blake2b(SECRET.encode(), digest_size=32).digest()
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=key).digest() + body


class Peer:
    """A decode worker without a channel: memory between two guards, and a connection on which it says what it likes."""

    seal = Seal(SECRET)

    def __init__(self, address: str, like: KVLayout, **unlike: Any) -> None:
        regions = unlike.get("num_layers", like.num_layers) * like.regions_per_layer
        block_bytes = unlike.get("block_bytes", like.block_bytes)
        size = regions * like.num_blocks * block_bytes
        self.memory = np.zeros(GUARD + size + GUARD, dtype=np.uint8)
        base = int(self.memory.ctypes.data) + GUARD
        bases = tuple(base + region * like.num_blocks * block_bytes for region in range(regions))
        self.layout = dataclasses.replace(like, bases=bases, **unlike)
        self.plane = InProcessPlane(f"peer-{id(self)}")
        self.plane.register(self.layout)
        self.hello = Hello(f"tcp://peer-{id(self)}", self.plane.name, self.plane.metadata(), self.layout)
        self.context = zmq.Context()
        self.address = address
        self.socket = self.dial()

    def dial(self) -> zmq.Socket[bytes]:
        """Another connection, of another identity."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(self.address)
        return socket

    def say(self, *messages: control.AnyMessage) -> None:
        for message in messages:
            self.socket.send(self.seal.pack(message))

    def hear(self) -> control.AnyMessage:
        """The next answer."""
        return self.seal.unpack(self.socket.recv())

    def ask(self, message: control.AnyMessage) -> control.AnyMessage:
        self.say(message)
        return self.hear()

    def assert_guards(self) -> None:
        assert not self.memory[:GUARD].any()
        assert not self.memory[-GUARD:].any()

    def close(self) -> None:
        self.context.destroy(0)
        self.plane.close()


def offer(key: tuple[str, int] = KEY, rank: int = 0, blocks: tuple[int, ...] = (1, 2), timeout_s: float = 10) -> Offer:
    return Offer(*key, rank, 0, list(blocks), timeout_s)


def prefill_all(prefill: Any, key: tuple[str, int] = KEY, request_id: str = "p") -> None:
    """Compute a prompt of two blocks and end it."""
    prefill.fill([5, 6], 1)
    prefill.save(key, request_id, 8, 8, [5, 6])
    prefill.channel.ended(key, request_id, True)


class FakePrefill:
    """The endpoint of a prefill worker, for what a decode worker hears."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def accept(self) -> bytes:
        """The identity of the decode worker that says hello."""
        identity: bytes = self.socket.recv_multipart()[0]
        return identity

    def say(self, to: bytes, frame: bytes) -> None:
        self.socket.send_multipart([to, frame])
