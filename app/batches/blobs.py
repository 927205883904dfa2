"""The bytes of files, by fsspec: a folder, or an object store. What blocks runs in threads of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

import fsspec

from deployments.errors import StoreAway

A = TypeVar("A")
PIECE = 256 * 1024
"""Bytes that are read or written at a time."""
_THREADS = 4


class Blobs:
    """`url`: a folder as fsspec names it. Close it. Raises StoreAway from all that reads and writes."""

    def __init__(self, url: str) -> None:
        self._files, self._root = fsspec.core.url_to_fs(url)
        self._threads = ThreadPoolExecutor(_THREADS, "baton-batch-files")
        self._is_made = False

    async def prepare(self) -> None:
        """Make the folder; once."""
        if not self._is_made:
            await self.apart(lambda: self._files.makedirs(self._root, exist_ok=True))
            self._is_made = True

    async def apart(self, work: Callable[[], A]) -> A:
        """What `work` gives, which may read and write files."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, _or_away, work)

    async def writer(self, name: str) -> Writer:
        """Write a file of this name. Close it."""
        return Writer(self, await self.apart(lambda: self._files.open(self._path(name), "wb")))

    async def reader(self, name: str, offset: int = 0) -> Reader:
        """Read a file of this name from a byte on. Close it."""

        def opened() -> Any:
            file = self._files.open(self._path(name), "rb", block_size=4 * PIECE)
            file.seek(offset)
            return file

        return Reader(self, await self.apart(opened))

    async def remove(self, name: str) -> None:
        """Remove a file; idempotent."""

        def removed() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

        await self.apart(removed)

    def close(self) -> None:
        """Let what runs end. Blocks for as long."""
        self._threads.shutdown(wait=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class Writer:
    """A file that is written, and held in memory by no more than a piece."""

    def __init__(self, blobs: Blobs, file: BinaryIO) -> None:
        self._blobs, self._file = blobs, file
        self._parts: list[bytes] = []
        self._held = 0
        self.bytes = 0
        """So many were given to it."""

    async def write(self, data: bytes) -> None:
        """Append."""
        self._parts.append(data)
        self._held += len(data)
        self.bytes += len(data)
        if self._held >= PIECE:
            await self._flush()

    async def close(self) -> None:
        """The file is whole, and on disk where it is on this machine's."""
        await self._flush()
        await self._blobs.apart(lambda: _closed(self._file))

    async def abandon(self) -> None:
        """The file is not to be finished; its caller removes it."""
        self._parts.clear()
        await self._blobs.apart(self._file.close)

    async def _flush(self) -> None:
        data, self._held = b"".join(self._parts), 0
        self._parts.clear()
        await self._blobs.apart(lambda: self._file.write(data))


class Reader:
    """A file that is read."""

    def __init__(self, blobs: Blobs, file: BinaryIO) -> None:
        self.blobs, self.file = blobs, file

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is left of it."""
        while piece := await self.blobs.apart(lambda: self.file.read(PIECE)):
            yield piece

    async def close(self) -> None:
        await self.blobs.apart(self.file.close)


def _closed(file: BinaryIO) -> None:
    file.flush()
    with contextlib.suppress(AttributeError, OSError):  # what is no file of this machine is whole when it is closed
        os.fsync(file.fileno())
    file.close()


def _or_away(work: Callable[[], A]) -> A:
    """What `work` gives. Raises StoreAway where the files cannot be reached."""
    try:
        return work()
    except OSError as error:
        raise StoreAway(f"the files of batches cannot be reached: {type(error).__name__}") from error
