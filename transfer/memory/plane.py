"""The data plane under a channel: something that copies blocks from this process's memory into a peer's."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar, Protocol

from transfer.memory.layout import KVLayout

WARM_UP_S = 2.0  # a data connection is made and taken down within this, while both sides let the transport work


class PlaneError(Exception):
    """Memory could not be registered, or a peer could not be reached."""


class WriteState(Enum):
    BUSY = "busy"
    DONE = "done"
    FAILED = "failed"


class Plane(Protocol):
    """Used by one thread at a time. Handles are opaque."""

    @property
    def name(self) -> str:
        """This side's agent name, unique in the deployment."""

    def enter_thread(self) -> None:
        """Called first, after `register`, on the thread that makes all further calls."""

    def register(self, layout: KVLayout) -> None:
        """Register this process's KV memory, whole and once. Raises PlaneError."""

    def metadata(self) -> bytes:
        """What a peer needs in order to write here."""

    def connect(self, agent: str, metadata: bytes, layout: KVLayout) -> None:
        """Prepare to write into a peer's memory. Raises PlaneError."""

    def disconnect(self, agent: str) -> None:
        """Forget a peer."""

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> Any:
        """Begin copying the shared heads of blocks `local` of a layer into the peer's blocks `remote`.

        Raises PlaneError.
        """

    def check(self, handle: Any) -> WriteState:
        """State of a write; a handle that is not BUSY is released and must not be used again."""

    def progress(self) -> None:
        """Let the transport work for peers that write here."""

    def close(self) -> None:
        """Release everything; idempotent."""


class InProcessPlane:
    """Copies within one process. The double of the NIXL plane, for tests and the mock engine."""

    _live: ClassVar[dict[str, KVLayout]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()  # memory may be freed once `close` has returned

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
                    which = layer * ours.regions_per_layer + region
                    target = theirs.bases[which] + there * theirs.block_bytes + skip_there
                    ctypes.memmove(target, ours.bases[which] + here * ours.block_bytes + skip, length)
        return WriteState.DONE

    def check(self, handle: WriteState) -> WriteState:
        return handle

    def progress(self) -> None:
        return

    def close(self) -> None:
        with InProcessPlane._lock:
            InProcessPlane._live.pop(self._name, None)
