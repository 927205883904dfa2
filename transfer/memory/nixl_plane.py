"""The data plane over NIXL. The only file that imports nixl.

All memory is registered at once. The descriptors of all blocks are prepared once per side, as strided lists. Where the
two sides split the heads differently, they cover the heads that both sides hold. A write selects descriptors by index,
and NIXL merges neighbours. NIXL's progress thread is off, because it spins when idle: the channel's thread drives the
transport while it has something to wait for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config

from transfer.memory.blocks import runs
from transfer.memory.layout import KVLayout
from transfer.memory.plane import PlaneError, WriteState

# Each of NIXL's own exceptions derives from Exception directly: they have no common base class.
NIXL_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(kind for kind in vars(_bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
_STATES = {"DONE": WriteState.DONE, "PROC": WriteState.BUSY}


class NixlPlane:
    """Writes into peers' memory with one NIXL agent. `transports`: the value of UCX_TLS, or None to let UCX choose."""

    def __init__(self, name: str, backend: str = "UCX", transports: str | None = None) -> None:
        if transports:
            os.environ["UCX_TLS"] = transports
        self._name = name
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[backend]))
        if backend not in self._agent.backends:
            raise PlaneError(f"NIXL has no backend {backend}; it has {self._agent.plugin_list}")
        self._layout: KVLayout | None = None
        self._registered: Any = None
        self._local: dict[tuple[int, int], Any] = {}  # prepared descriptors by window
        self._remote: dict[str, tuple[KVLayout, Any, Any]] = {}  # layout, our descriptors, theirs

    @property
    def name(self) -> str:
        return self._name

    def enter_thread(self) -> None:
        """Make the CUDA context of the cache's device on this thread.

        A thread begins on device 0 and without a CUDA context, and UCX would then copy through main memory.
        """
        if self._layout is not None and self._layout.device == "cuda":
            torch.cuda.set_device(self._layout.device_id)
            torch.zeros(1, device=f"cuda:{self._layout.device_id}")  # makes the context

    def register(self, layout: KVLayout) -> None:
        size = layout.num_blocks * layout.block_bytes
        slabs = [(base, size, layout.device_id, "") for base in layout.bases]
        self._registered = self._agent.register_memory(slabs, _segment(layout))
        self._layout = layout
        self._prepare_local((0, layout.block_bytes))

    def _prepare_local(self, window: tuple[int, int]) -> Any:
        """Our descriptors of one window (offset, length) of every block. They are made once."""
        assert self._layout is not None
        if window not in self._local:
            rows = _strided(self._layout, *window)
            self._local[window] = self._agent.prep_xfer_dlist("", rows, _segment(self._layout))
        return self._local[window]

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def connect(self, agent: str, metadata: bytes, layout: KVLayout) -> None:
        if self._layout is None:
            raise PlaneError("no memory is registered")
        try:
            added = self._agent.add_remote_agent(metadata)
        except NIXL_ERRORS as error:
            raise PlaneError(f"cannot reach {agent}: {error}") from error
        named = added.decode() if isinstance(added, bytes) else added
        if named != agent:
            if named not in self._remote:
                self._remove(named)
            raise PlaneError(f"metadata of {named!r} came as {agent!r}")
        try:
            rows = _strided(layout, *layout.window(self._layout))
            theirs = self._agent.prep_xfer_dlist(agent, rows, _segment(layout))
            self._remote[agent] = layout, self._prepare_local(self._layout.window(layout)), theirs
            self._agent.send_notif(agent, b"hello")  # makes the data connection now, not at the first write
        except NIXL_ERRORS as error:
            self.disconnect(agent)
            raise PlaneError(f"cannot reach {agent}: {error}") from error

    def disconnect(self, agent: str) -> None:
        if peer := self._remote.pop(agent, None):
            with contextlib.suppress(*NIXL_ERRORS):  # NIXL forgets an agent itself when its process dies
                self._agent.release_dlist_handle(peer[2])
        self._remove(agent)

    def _remove(self, agent: str) -> None:
        with contextlib.suppress(*NIXL_ERRORS):  # the same reason
            self._agent.remove_remote_agent(agent)

    def write(self, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> Any:
        if self._layout is None or agent not in self._remote:
            raise PlaneError(f"no connection to {agent}")
        theirs, from_here, to_there = self._remote[agent]
        here, there = _indices(self._layout, theirs, layer, local, remote)
        handle = None
        try:
            handle = self._agent.make_prepped_xfer("WRITE", from_here, here, to_there, there)
            self._agent.transfer(handle)
        except NIXL_ERRORS as error:
            self._release(handle)
            raise PlaneError(f"a write to {agent} could not be posted: {error}") from error
        return handle

    def check(self, handle: Any) -> WriteState:
        try:
            state = _STATES.get(self._agent.check_xfer_state(handle), WriteState.FAILED)
        except NIXL_ERRORS:
            state = WriteState.FAILED
        if state is not WriteState.BUSY:
            self._release(handle)
        return state

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(*NIXL_ERRORS):  # a failed transfer's handle may be gone with its peer
            if handle is not None:
                self._agent.release_xfer_handle(handle)

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        for agent in list(self._remote):
            self.disconnect(agent)
        if self._registered is not None:
            for descriptors in self._local.values():
                self._agent.release_dlist_handle(descriptors)
            self._agent.deregister_memory(self._registered)
            self._registered = None


def _segment(layout: KVLayout) -> str:
    return "DRAM" if layout.device == "cpu" else "VRAM"


def _strided(layout: KVLayout, skip: int, length: int) -> np.ndarray:
    """One row per region, for `length` bytes at `skip` in every block: address, bytes, device, stride, count."""
    rows = [(base + skip, length, layout.device_id, layout.block_bytes, layout.num_blocks) for base in layout.bases]
    return np.array(rows, dtype=np.uint64)


def _indices(
    ours: KVLayout, theirs: KVLayout, layer: int, local: Sequence[int], remote: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Descriptor indices of both sides, in ascending runs, so that NIXL merges neighbours."""
    here: list[int] = []
    there: list[int] = []
    for region in range(ours.regions_per_layer):
        for start, target, count in runs(local, remote):
            first, second = ours.index(layer, start, region), theirs.index(layer, target, region)
            here.extend(range(first, first + count))
            there.extend(range(second, second + count))
    return np.array(here, dtype=np.int32), np.array(there, dtype=np.int32)
