"""A data plane that copies within one process. It stands in for the NIXL plane."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import ClassVar

from transfer.memory.layout import KVLayout
from transfer.memory.plane import PlaneError, WriteState


class InProcessPlane:
    """Copies within one process. Tests and the mock engine use it in place of the NIXL plane."""

    _live: ClassVar[dict[str, KVLayout]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()  # memory may be freed after `close` returns

    def __init__(self, name: str) -> None:
        self._name = name
        self._layout: KVLayout | None = None
        self._peers: dict[str, KVLayout] = {}

    @property
    def name(self) -> str:
        return self._name

    def enter_thread(self) -> None:
        return

    def register(self, layout: KVLayout) -> None:
        self._layout = layout
        InProcessPlane._live[self._name] = layout

    def metadata(self) -> bytes:
        return str(os.getpid()).encode()

    def connect(self, agent: str, metadata: bytes, layout: KVLayout) -> None:
        if metadata != self.metadata():
            raise PlaneError("the in-process channel reaches its own process only")
        if InProcessPlane._live.get(agent) != layout:
            raise PlaneError(f"{agent} has registered no such memory")
        self._peers[agent] = layout

    def disconnect(self, agent: str) -> None:
        self._peers.pop(agent, None)

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> WriteState:
        ours, theirs = self._layout, self._peers.get(agent)
        if ours is None or theirs is None:
            raise PlaneError(f"no connection to {agent}")
        skip, length = ours.window(theirs)
        skip_there, _ = theirs.window(ours)
        with InProcessPlane._lock:
            if agent not in InProcessPlane._live:
                return WriteState.FAILED
            for here, there in zip(local, remote, strict=True):
                for region in range(ours.regions_per_layer):
                    target = theirs.address(layer, there, region) + skip_there
                    ctypes.memmove(target, ours.address(layer, here, region) + skip, length)
        return WriteState.DONE

    def check(self, handle: WriteState) -> WriteState:
        return handle

    def progress(self) -> None:
        return

    def close(self) -> None:
        with InProcessPlane._lock:
            InProcessPlane._live.pop(self._name, None)
