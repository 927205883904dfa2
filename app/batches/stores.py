"""The stores of one ingress, and how a new file comes into them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.batches import file_rows
from app.batches.blobs import Blobs, Writer
from app.batches.database import Database
from app.batches.file_rows import LEFT_S, Quota
from app.batches.records import File, new_id

TELL_S = LEFT_S / 10
"""How often it is noted that a file still grows, in seconds."""


@dataclass(frozen=True)
class Stores:
    """`file_ttl_s`: of files that say nothing else. `clock`: seconds since 1970."""

    database: Database
    blobs: Blobs
    quota: Quota
    file_ttl_s: int
    clock: Callable[[], float] = time.time

    async def prepare(self) -> None:
        """Make the tables and the folder, or bring them up to date; idempotent, and free once it has been done."""
        await self.database.migrate()
        await self.blobs.prepare()

    def new_file(self, owner: str, purpose: str, filename: str, ttl_s: int | None = None) -> File:
        """A file that has nothing in it yet, and is in no store."""
        now_s = int(self.clock())
        expires_s = now_s + (self.file_ttl_s if ttl_s is None else ttl_s)
        return File(new_id("file-"), owner, purpose, filename, 0, now_s, expires_s)

    async def remove(self, file_id: str) -> None:
        """Remove the bytes of a deleted file, and forget it."""
        await self.blobs.remove(file_id)
        await self.database.write(lambda connection: file_rows.forget(connection, file_id))

    async def close(self) -> None:
        """Close both. What runs in their threads ends first."""
        await asyncio.to_thread(self.database.close)
        await asyncio.to_thread(self.blobs.close)


class NewFile:
    """A file while it is written. Another ingress removes it where this one dies before it is finished."""

    def __init__(self, stores: Stores, file: File, writer: Writer) -> None:
        self._stores, self._writer, self._told_s = stores, writer, stores.clock()
        self.file = file

    @classmethod
    async def begin(cls, stores: Stores, file: File, quota: Quota | None) -> NewFile:
        """Raises BatchQuotaSpent. `quota`: None: there is no limit."""
        now_s = stores.clock()
        await stores.database.write(lambda connection: file_rows.begin(connection, file, quota, now_s))
        return cls(stores, file, await stores.blobs.writer(file.id))

    async def write(self, data: bytes) -> None:
        """Append."""
        await self._writer.write(data)
        self.file = replace(self.file, bytes=self._writer.bytes)
        now_s = self._stores.clock()
        if now_s - self._told_s >= TELL_S:
            self._told_s, size, file_id = now_s, self.file.bytes, self.file.id
            await self._stores.database.write(lambda c: file_rows.grew(c, file_id, size, now_s))

    async def close(self) -> None:
        """All bytes are on disk; `file_rows.finish` shows the file."""
        await self._writer.close()

    async def drop(self) -> None:
        """It is not to be finished."""
        await self._writer.abandon()
        await self._stores.database.write(lambda connection: file_rows.drop(connection, self.file.id))
        await self._stores.remove(self.file.id)
