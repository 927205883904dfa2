"""The data plane under a channel: it copies blocks from this process's memory into a peer's."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from transfer.memory.layout import KVLayout


class PlaneError(Exception):
    """Memory could not be registered, or a peer could not be reached."""


class WriteState(Enum):
    BUSY = "busy"
    DONE = "done"
    FAILED = "failed"


class Plane(Protocol):
    """Only one thread at a time uses a plane. The handle of a write is opaque."""

    @property
    def name(self) -> str:
        """This side's agent name, unique in the deployment."""

    def enter_thread(self) -> None:
        """Called once, after `register`, on the thread that makes all further calls."""

    def register(self, layout: KVLayout) -> None:
        """Register all KV memory of this process. Called once. Raises PlaneError."""

    def metadata(self) -> bytes:
        """The bytes that a peer needs in order to write here."""

    def connect(self, agent: str, metadata: bytes, layout: KVLayout) -> None:
        """Prepare to write into a peer's memory. Raises PlaneError."""

    def disconnect(self, agent: str) -> None:
        """Forget a peer."""

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> Any:
        """Begin copying the shared heads of blocks `local` of a layer into the peer's blocks `remote`.

        `layer`: as the model numbers them; both sides have it. Raises PlaneError.
        """

    def check(self, handle: Any) -> WriteState:
        """The state of a write. Unless it is BUSY, the handle is released and must not be used again."""

    def progress(self) -> None:
        """Let the transport work for peers that write here."""

    def close(self) -> None:
        """Release everything; idempotent."""
