"""A data plane of engines that are forked from this process: when told to, it flips a bit of what it writes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from transfer.memory.nixl_plane import NixlPlane
from transfer.memory.plane import WriteState

SIGN_AND_EXPONENT, BIT = 3, 0x40
"""The byte of a float32 that is flipped, and the bit: the number is another by orders of magnitude."""


def flip_when_told(monkeypatch: pytest.MonkeyPatch, order: Path, replica_id: str) -> None:
    """The next write of layer 0 by this replica has a wrong bit in its block number N, once `order` says N.

    The source's own memory is as before when the write is over. The file is gone then.
    """
    write, check = NixlPlane.write, NixlPlane.check
    flipped: dict[int, int] = {}

    def writing(plane: NixlPlane, agent: str, layer: int, local: Sequence[int], remote: Sequence[int]) -> Any:
        if layer or not plane.name.startswith(replica_id) or not order.exists():
            return write(plane, agent, layer, local, remote)
        assert plane._layout is not None
        address = plane._layout.address(layer, local[int(order.read_text())]) + SIGN_AND_EXPONENT
        _flip(address)
        handle = write(plane, agent, layer, local, remote)
        flipped[id(handle)] = address
        return handle

    def checking(plane: NixlPlane, handle: Any) -> WriteState:
        state = check(plane, handle)
        if state is not WriteState.BUSY and (address := flipped.pop(id(handle), None)) is not None:
            _flip(address)
            order.unlink()
        return state

    monkeypatch.setattr(NixlPlane, "write", writing)
    monkeypatch.setattr(NixlPlane, "check", checking)


def _flip(address: int) -> None:
    ctypes.c_uint8.from_address(address).value ^= BIT
