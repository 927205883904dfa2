"""The work of an engine: chunks of prompts, computed layer by layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from transfer.channel.outbox import Key
from transfer.memory.partition import ONE_WORKER, Partition


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a request that one engine step computes.

    After the step, the KV of the first `computed` of `prompt` tokens lies in `blocks`. `peers`: how the workers of the
    decode replica split it.
    """

    key: Key
    request_id: str
    computed: int
    prompt: int
    blocks: tuple[int, ...]
    peers: Partition = ONE_WORKER


class Ready(Protocol):
    """Tells whether a layer's KV is in memory. It is a CUDA event, recorded on the compute stream."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class LaunchedLayers:
    """The layers that an engine has launched on its GPU and that may not be computed yet, in their order.

    An engine launches layers far ahead of its GPU. If the channel's thread waited for each layer when it is launched,
    it would post the first write only after the last layer.
    """

    def __init__(self) -> None:
        self._launched: deque[tuple[tuple[Chunk, ...], int, Ready]] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    def add(self, chunks: tuple[Chunk, ...], layer: int, ready: Ready) -> None:
        """A layer of these chunks is launched. `ready` tells when it is computed."""
        self._launched.append((chunks, layer, ready))

    def take(self, wait: bool = False) -> Iterator[tuple[tuple[Chunk, ...], int]]:
        """The chunks and layers that are computed by now, oldest first. With `wait`: wait for all launched layers."""
        while self._launched:
            chunks, layer, ready = self._launched[0]
            if wait:
                ready.synchronize()
            elif not ready.query():
                return
            self._launched.popleft()
            yield chunks, layer
