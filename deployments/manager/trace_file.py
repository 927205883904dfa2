"""The file of a traffic trace: JSON lines, a superset of Mooncake's, which `load_tests.simulator.traces` reads.

`{"timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "max_tokens", "class", "outcome"}`: the time
of arrival in milliseconds since 1970, lengths in tokens, an id for each full block of the prompt, and a block's tokens.

An id names a block and all before it, so equal ids show prompts that begin alike. It is a hash with a key that each
process makes anew and keeps nowhere, so the file alone does not even confirm a guess of a prompt.

A thread hashes and writes. The event loop hands it lines, and never waits. What cannot be written ends the trace, and
never a request. Two managers may write at once while one takes over from the other: the file is locked for each line.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from configs.schema import TraceConfig
from deployments.manager.traffic import Line

logger = logging.getLogger("baton.trace")

ID_BYTES = 5
"""The bytes of an id: the simulator keeps the bits above for itself. In a million blocks, about one pair is alike by
chance."""
HELD_LINES = 2_000
"""The most lines that wait for a slow disk; what comes on top of that is left out. A line of a long prompt has some
thousand hashes, so these take a few hundred megabytes at the very most."""
CLOSE_S = 5.0
"""The longest time that closing waits for the disk."""


class TraceFile:
    """Appends lines to a file, and to a new one when it is half as long as both may be.

    `block_tokens`: of the lines' hashes. `since_s`: what the clock of `Line.at_s` read when the wall clock read 0.
    """

    def __init__(self, config: TraceConfig, block_tokens: int, since_s: float | None = None) -> None:
        self.path, self._most_bytes = config.path, max(1, config.max_bytes // 2)
        self._block_tokens = block_tokens
        self._since_s = time.monotonic() - time.time() if since_s is None else since_s
        self._key = secrets.token_bytes(32)
        self._lines: queue.Queue[Line | None] = queue.Queue(HELD_LINES)
        self._left_out, self._stopped = False, False
        self._thread = threading.Thread(target=self._run, name="baton-trace", daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        """Whether writing has failed: then nothing more is written."""
        return self._stopped

    def put(self, line: Line) -> None:
        """Have a line written. Returns at once."""
        if self._stopped:
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._leave_out("the disk is slow")

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write what was put, and close the file; idempotent. Blocks for at most about twice `within_s`."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=within_s)
        self._thread.join(within_s)
        if self._thread.is_alive():
            logger.warning("%s: not all is written: the disk takes longer than %g s", self.path, within_s)
        self._stopped = True

    def _leave_out(self, why: str) -> None:
        if not self._left_out:
            logger.warning("%s: %s, and lines are left out", self.path, why)
        self._left_out = True

    # ---- the thread

    def _run(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            logger.error("%s: %s: the traffic is traced no more", self.path, error)
        finally:
            self._stopped = True
            while not self._lines.empty():
                self._lines.get_nowait()

    def _write_all(self) -> None:
        file = _opened(self.path)
        try:
            while (line := self._lines.get()) is not None:
                text = self.encoded(line)
                if len(text) > self._most_bytes:
                    self._leave_out("one session takes more than half of max_bytes")
                    continue
                while not _append(file, text, self._most_bytes):
                    full, file = file, self._next(file)
                    os.close(full)
        finally:
            os.close(file)

    def _next(self, full: int) -> int:
        """A new file in place of a full one, unless another manager has made it already."""
        with _locked(full):
            if _is_at(full, self.path):
                self.path.replace(older(self.path))
        return _opened(self.path)

    def encoded(self, line: Line) -> bytes:
        """A line as it stands in the file."""
        row = {
            "timestamp": round((line.at_s - self._since_s) * 1e3),
            "input_length": line.prompt_tokens,
            "output_length": line.output_tokens,
            "hash_ids": [self._id(block) for block in line.hashes],
            "block_tokens": self._block_tokens,
            "max_tokens": line.max_tokens,
            "class": line.priority,
            "outcome": line.outcome,
        }
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"

    def _id(self, block: int) -> int:
        digest = hashlib.blake2b(block.to_bytes(8, "little"), digest_size=ID_BYTES, key=self._key)
        return int.from_bytes(digest.digest(), "little")


def older(path: Path) -> Path:
    """Where the part before the file's is."""
    return path.with_name(f"{path.name}.1")


def _opened(path: Path) -> int:
    """The file, for its owner alone, without the piece of a line that a crash may have left at its end."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        with _locked(file):
            size = os.fstat(file).st_size
            if (whole := _whole_lines(file, size)) < size:
                os.ftruncate(file, whole)
    except OSError:
        os.close(file)
        raise
    return file


def _whole_lines(file: int, size: int) -> int:
    """The bytes up to the end of the last whole line."""
    while size > 0:
        begin = max(0, size - 4096)
        line_end = os.pread(file, size - begin, begin).rfind(b"\n")
        if line_end >= 0:
            return begin + line_end + 1
        size = begin
    return 0


def _append(file: int, line: bytes, most_bytes: int) -> bool:
    """Append all of it or nothing; False where the file would become too long. Raises OSError for a full disk."""
    with _locked(file):
        begin, written = os.fstat(file).st_size, 0
        if begin + len(line) > most_bytes:
            return False
        try:
            while written < len(line):
                written += os.write(file, line[written:])
        except OSError:
            if written:
                os.ftruncate(file, begin)
            raise
        return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
