"""Reading and writing blocks of one file: by the system's own calls, or by NIXL."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from typing import Protocol

from transfer.store.host_buffer import HostBuffer

logger = logging.getLogger("baton.store")


class BlockFile(Protocol):
    """Whole blocks of an open file. `buffers` are views of a buffer that it was made with."""

    def read(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer from its offset. Raises OSError, and then any buffer may hold anything."""

    def write(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Write each buffer at its offset. Raises OSError, and then any of the places may hold anything."""

    def close(self) -> None:
        """Release what it made, but not the file."""


class SystemFile:
    """By `preadv` and `pwritev`."""

    def __init__(self, fileno: int) -> None:
        self._fileno = fileno

    def read(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for offset, buffer in zip(offsets, buffers, strict=True):
            done = 0
            while done < buffer.nbytes:
                if not (count := os.preadv(self._fileno, [buffer[done:]], offset + done)):
                    raise OSError(errno.EIO, "the file ends inside a block")
                done += count

    def write(self, offsets: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for offset, buffer in zip(offsets, buffers, strict=True):
            done = 0
            while done < buffer.nbytes:
                done += os.pwritev(self._fileno, [buffer[done:]], offset + done)

    def close(self) -> None:
        return


def open_block_file(fileno: int, buffers: Sequence[HostBuffer], use_nixl: bool) -> BlockFile:
    """A file over NIXL's POSIX plugin, or without it where it is not wanted or not there; the log says so."""
    if not use_nixl:
        return SystemFile(fileno)
    try:
        from transfer.store.nixl_file import NixlFile

        return NixlFile(fileno, buffers)
    except (ImportError, OSError) as error:
        logger.warning("the disk tier goes without NIXL's POSIX plugin: %s", error)
        return SystemFile(fileno)
