"""A segment: the two files of one disk tier, and the records that say which block is in which slot.

`segment-N.blocks` has slots of one block, whole pages each. `segment-N.index` has one record for each slot, written
after the slot's bytes and cleared before others are written there. So a process that is killed leaves whole blocks
with records, and torn ones without. Nothing is synchronised to the disk: after a power cut a record may be there
without its bytes, and the block's digest finds that at its load.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transfer.memory.digest import digest_of
from transfer.store.refs import BlockRef, StoreError
from transfer.store.slots import Held

logger = logging.getLogger("baton.store")

FOLDER = "baton-kv"
TURN = "choosing.lock"
"""The process that has it locked chooses its segment."""
TURN_S = 30.0
"""The longest that a process waits for its turn: the disk of another one may hang."""
PAGE_BYTES = 4096
RECORD_BYTES = 256  # a record lies in one sector of the disk
_READ_AT_ONCE = 4096  # records
_MAGIC = b"BKV1"
_RECORD = struct.Struct("<4sIQQ16s32s32s16s")  # magic, position, sequence, bytes, model, key, parent, digest


def slot_bytes(block_bytes: int) -> int:
    """Bytes of a slot on the disk: whole pages, so that a torn write of one slot is in no other."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def model_of(fingerprint: str, block_bytes: int) -> bytes:
    """The 16 bytes by which a record names a fingerprint."""
    return hashlib.blake2b(f"{block_bytes}\0{fingerprint}".encode(), digest_size=16).digest()


class Segment:
    """One segment, locked by this process. Open one with `open_segment`."""

    def __init__(self, path: Path, index: int, model: bytes, block_bytes: int) -> None:
        self.path, self._index, self._model, self._block_bytes = path, index, model, block_bytes
        self._blocks = -1
        self._sequence = 0

    @property
    def fileno(self) -> int:
        """The descriptor of the blocks' file."""
        return self._blocks

    def offset(self, slot: int) -> int:
        """Where a slot begins in the blocks' file, in bytes."""
        return slot * slot_bytes(self._block_bytes)

    def records(self) -> Iterator[tuple[int, Held]]:
        """The valid records of this fingerprint, each with its sequence number. Raises OSError."""
        begin = 0
        while data := os.pread(self._index, _READ_AT_ONCE * RECORD_BYTES, begin * RECORD_BYTES):
            for at in range(len(data) // RECORD_BYTES):
                if found := self._parse(data[at * RECORD_BYTES : (at + 1) * RECORD_BYTES], begin + at):
                    yield found
            begin += max(len(data) // RECORD_BYTES, 1)

    def take(self, slots: int) -> list[Held]:
        """Make room for `slots` slots and return the blocks in them, each once, oldest first.

        Records of another fingerprint, of slots that are no more, and torn ones are cleared. Raises OSError where the
        disk has no room.
        """
        found = sorted((record for record in self.records() if record[1].slot < slots), key=lambda record: record[0])
        newest = {held.ref.key: held for _, held in found}
        self._sequence = found[-1][0] if found else 0
        self._clear_all_but({held.slot for held in newest.values()}, slots)
        self._blocks = os.open(self.path.with_suffix(".blocks"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        old_bytes = os.fstat(self._blocks).st_size
        os.ftruncate(self._blocks, self.offset(slots))
        try:
            if slots:
                os.posix_fallocate(self._blocks, 0, self.offset(slots))
        except OSError:
            os.ftruncate(self._blocks, min(old_bytes, self.offset(slots)))  # gives back what it took of a full disk
            raise
        return list(newest.values())

    def write(self, held: Held) -> None:
        """Say that a slot has its block. Raises OSError, and then the slot may have any record."""
        self._sequence += 1
        ref = held.ref
        row = _RECORD.pack(
            _MAGIC, ref.position, self._sequence, self._block_bytes, self._model, ref.key, ref.parent, held.digest
        )
        _write_all(self._index, (row + digest_of(row)).ljust(RECORD_BYTES, b"\0"), held.slot * RECORD_BYTES)

    def clear(self, slot: int) -> None:
        """Say that a slot is empty. Raises OSError."""
        _write_all(self._index, bytes(RECORD_BYTES), slot * RECORD_BYTES)

    def close(self) -> None:
        """Close the files and give up the lock; idempotent."""
        for name in ("_blocks", "_index"):
            if (fileno := getattr(self, name)) >= 0:
                os.close(fileno)
                setattr(self, name, -1)

    def _parse(self, row: bytes, slot: int) -> tuple[int, Held] | None:
        body = row[: _RECORD.size]
        magic, position, sequence, size, model, key, parent, digest = _RECORD.unpack(body)
        if magic != _MAGIC or digest_of(body) != row[_RECORD.size : _RECORD.size + 16]:
            return None
        if model != self._model or size != self._block_bytes:
            return None
        return sequence, Held(BlockRef(key, position, parent), slot, digest)

    def _clear_all_but(self, kept: set[int], slots: int) -> None:
        os.ftruncate(self._index, slots * RECORD_BYTES)
        for slot in range(slots):
            if slot not in kept and any(os.pread(self._index, RECORD_BYTES, slot * RECORD_BYTES)):
                self.clear(slot)


def open_segment(directory: Path, fingerprint: str, block_bytes: int) -> Segment:
    """Lock the free segment of a directory that has the most blocks of a fingerprint, or make a new segment.

    A process ends up with another's segment only where that process does not run. So a directory has as many segments
    as processes have used it at once. Processes choose one after another: each locks all free segments while it counts
    their blocks, and another that came then would not find its own. Raises StoreError for a directory that others may
    read, and OSError.
    """
    folder, model = _own_folder(directory), model_of(fingerprint, block_bytes)
    with _turn(folder):
        return _chosen(folder, model, block_bytes)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """This process chooses alone, or beside another that takes longer than `TURN_S`."""
    lock = os.open(folder / TURN, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        until_s = time.monotonic() + TURN_S
        while not (has_turn := _try_lock(lock)) and time.monotonic() < until_s:
            time.sleep(0.01)
        if not has_turn:
            logger.warning("another process has been choosing its segment in %s for %.0f s", folder, TURN_S)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
        os.close(lock)


def _chosen(folder: Path, model: bytes, block_bytes: int) -> Segment:
    paths = sorted(folder.glob("segment-*.index"))
    free = [found for path in paths if (found := _lock(path, os.O_RDWR, model, block_bytes)) is not None]
    best: Segment | None = None
    try:
        best = max(free, key=lambda segment: sum(1 for _ in segment.records()), default=None)
    finally:
        for segment in free:
            if segment is not best:
                segment.close()
    number = 0
    while best is None:
        best = _lock(folder / f"segment-{number}.index", os.O_RDWR | os.O_CREAT | os.O_EXCL, model, block_bytes)
        number += 1
    return best


def _own_folder(directory: Path) -> Path:
    """A folder in `directory` that only this user may enter."""
    folder = directory / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StoreError(f"{folder} must be a folder of this process's user with mode 0700")
    return folder


def _lock(path: Path, flags: int, model: bytes, block_bytes: int) -> Segment | None:
    """A segment, or None where it is another process's, or where it cannot be opened."""
    try:
        index = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return None
    except OSError as error:
        if flags & os.O_CREAT:
            raise
        logger.warning("the disk tier leaves %s alone: %s", path, error)
        return None
    if not _try_lock(index):
        os.close(index)
        return None
    return Segment(path, index, model, block_bytes)


def _try_lock(fileno: int) -> bool:
    """Lock a file, unless another process has it locked; returns whether it is."""
    try:
        fcntl.flock(fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(fileno: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fileno, data[done:], offset + done)
