"""What an engine computes: chunks of prompts, layer by layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from transfer.channel.outbox import Key


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one engine step computes of a request: after it, the first `computed` of `prompt` tokens lie in `blocks`.

    `peers`: the number of workers of the decode replica.
    """

    key: Key
    request_id: str
    computed: int
    prompt: int
    blocks: tuple[int, ...]
    peers: int = 1


class Ready(Protocol):
    """Tells whether a layer's KV is in memory: a CUDA event, recorded on the compute stream."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class LaunchedLayers:
    """Layers that an engine has launched on its GPU and that may not be computed yet, in their order.

    An engine launches layers far ahead of its GPU. A thread that waited for each layer when it is launched would post
    the first write after the last layer.
    """

    def __init__(self) -> None:
        self._launched: deque[tuple[tuple[Chunk, ...], int, Ready]] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    def add(self, chunks: tuple[Chunk, ...], layer: int, ready: Ready) -> None:
        """A layer of these chunks was launched; `ready` tells when it is computed."""
        self._launched.append((chunks, layer, ready))

    def take(self, wait: bool = False) -> Iterator[tuple[tuple[Chunk, ...], int]]:
        """Chunks and layer of what is computed by now, oldest first. With `wait`: of everything that was launched."""
        while self._launched:
            chunks, layer, ready = self._launched[0]
            if wait:
                ready.synchronize()
            elif not ready.query():
                return
            self._launched.popleft()
            yield chunks, layer
