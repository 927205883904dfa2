"""What may happen to a worker's messages on the KV channel: dropped, delayed, sent twice, or changed on their way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

SHARE = 0.5
"""The share of the messages sent during a fault that suffer it. The others go as they should."""

MESSAGE_FAULTS = ("drop", "delay", "duplicate", "corrupt")


class _Garbling:
    """A seal whose frames have one wrong bit."""

    def __init__(self, seal: Any, draw: random.Random) -> None:
        self._seal, self._draw = seal, draw

    def pack(self, message: Any) -> bytes:
        frame = bytearray(self._seal.pack(message))
        frame[self._draw.randrange(len(frame))] ^= 1 << self._draw.randrange(8)
        return bytes(frame)


@contextlib.contextmanager
def disturbed(engine: Any, fault: str, draw: random.Random, delay_s: float) -> Iterator[None]:
    """While this is open, half of what a mock engine sends, control messages and first tokens, suffers the fault.

    The engine's own parts are wrapped, and are restored at the end. A delayed message may arrive after the end.
    """
    channel, tokens = engine._connections.channel, engine._connections.tokens
    loop = asyncio.get_running_loop()

    def later(call: Callable[[], None]) -> None:  # on the channel's own thread, which is the only one that may send
        loop.call_soon_threadsafe(loop.call_later, delay_s * draw.random(), channel._do, call)

    def soon(call: Callable[[], None]) -> None:
        loop.call_later(delay_s * draw.random(), call)

    with _wrapped(channel._endpoint, fault, draw, later), _wrapped(tokens, fault, draw, soon):
        yield


@contextlib.contextmanager
def _wrapped(
    sender: Any, fault: str, draw: random.Random, later: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    send, seal = sender.send, sender._seal
    garbling = _Garbling(seal, draw)

    def faulty(to: Any, message: Any) -> None:
        if draw.random() >= SHARE:
            send(to, message)
        elif fault == "delay":
            later(lambda: send(to, message))
        elif fault == "duplicate":
            send(to, message)
            send(to, message)
        elif fault == "corrupt":
            sender._seal = garbling
            try:
                send(to, message)
            finally:
                sender._seal = seal

    sender.send = faulty
    try:
        yield
    finally:
        del sender.send
