"""Blocks of a file over NIXL's POSIX plugin."""

from __future__ import annotations

import contextlib
import errno
import time
import uuid
from collections.abc import Sequence
from typing import Any

from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config

from transfer.store.block_memory import address_of
from transfer.store.host_buffer import HostBuffer

# Each of NIXL's own exceptions derives from Exception directly: they have no common base class.
_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(kind for kind in vars(_bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
_POLL_S = 20e-6
LONGEST_S = 30.0
"""The longest time of one read or write. The disk tier then goes on without NIXL."""


class NixlFile:
    """One agent for one file and the buffers that its blocks go to and come from. Raises OSError without the plugin."""

    def __init__(self, fileno: int, buffers: Sequence[HostBuffer]) -> None:
        self._fileno = fileno
        self._registered: list[Any] = []
        try:
            self._agent = nixl_agent(f"store-{uuid.uuid4().hex}", nixl_agent_config(False, backends=["POSIX"]))
            if "POSIX" not in self._agent.backends:
                raise OSError(errno.ENOSYS, f"NIXL has no POSIX plugin; it has {self._agent.plugin_list}")
            slabs = [(buffer.address, buffer.nbytes, 0, "") for buffer in buffers]
            self._registered.append(self._agent.register_memory(slabs, "DRAM"))
            self._registered.append(self._agent.register_memory([(0, 0, fileno, "")], "FILE"))
        except _ERRORS as error:
            raise OSError(errno.EIO, f"NIXL: {error}") from error

    def read(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        self._transfer("READ", offsets, buffers)

    def write(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        self._transfer("WRITE", offsets, buffers)

    def _transfer(self, operation: str, offsets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        memory = [(address_of(buffer), buffer.nbytes, 0) for buffer in buffers]
        file = [(offset, buffer.nbytes, self._fileno) for offset, buffer in zip(offsets, buffers, strict=True)]
        handle = None
        try:
            ours, theirs = self._agent.get_xfer_descs(memory, "DRAM"), self._agent.get_xfer_descs(file, "FILE")
            handle = self._agent.initialize_xfer(operation, ours, theirs, self._agent.name)
            state = self._agent.transfer(handle)
            deadline = time.monotonic() + LONGEST_S
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, f"NIXL {operation} takes longer than {LONGEST_S:g} s")
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        except _ERRORS as error:
            raise OSError(errno.EIO, f"NIXL {operation}: {error}") from error
        finally:
            if handle is not None:
                with contextlib.suppress(*_ERRORS):  # a failed transfer's handle may refuse
                    self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(errno.EIO, f"NIXL {operation}: {state}")

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
