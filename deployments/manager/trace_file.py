"""The file of a traffic trace: JSON lines, a superset of Mooncake's, which `load_tests.simulator.traces` reads.

`{"timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "max_tokens", "class", "outcome"}`: the time
of arrival in milliseconds since 1970, lengths in tokens, an id for each full block of the prompt, and a block's tokens.

An id names a block and all before it, so equal ids show prompts that begin alike. It is a hash with a key that each
process makes anew and keeps nowhere, so the file alone does not even confirm a guess of a prompt.

A thread hashes and writes. The event loop hands it lines, and never waits. What cannot be written is an end of the
trace, and never of a request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from pathlib import Path

from configs.schema import TraceConfig
from deployments.manager.traffic import Line

logger = logging.getLogger("baton.trace")

ID_BYTES = 5
"""The bytes of an id: the simulator keeps the bits above for itself. In a million blocks, about one pair is alike by
chance."""
HELD_LINES = 10_000
"""The most lines that wait for a slow disk; what comes on top of that is left out."""
BATCH_LINES = 256
"""The most lines of one write."""
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
        self._left_out, self._closing, self._stopped = 0, False, False
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
            self._left_out += 1
            if self._left_out == 1:
                logger.warning("%s: the disk is slow, and lines are left out", self.path)

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write what was put, and close the file; idempotent. Blocks for at most about twice `within_s`."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=within_s)
        self._thread.join(within_s)
        if self._thread.is_alive():
            logger.warning("%s: not all is written: the disk takes longer than %g s", self.path, within_s)
        self._stopped = True

    # ---- the thread

    def _run(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            logger.error("%s: %s: the traffic is traced no more", self.path, error)
        self._stopped = True
        while not self._lines.empty():
            self._lines.get_nowait()

    def _write_all(self) -> None:
        file = _opened(self.path)
        try:
            while batch := self._next_lines():
                if os.fstat(file).st_size >= self._most_bytes:
                    self.path.replace(older(self.path))
                    full, file = file, _opened(self.path)
                    os.close(full)
                _append(file, b"".join(self.encoded(line) for line in batch))
        finally:
            os.close(file)

    def _next_lines(self) -> list[Line]:
        """What waits, at least one line; none once the trace is closed and all is written."""
        lines: list[Line] = []
        while not (lines and self._lines.empty()) and len(lines) < BATCH_LINES and not self._closing:
            line = self._lines.get()
            if line is None:
                self._closing = True
            else:
                lines.append(line)
        return lines

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
    size = whole = os.fstat(file).st_size
    while whole > 0:
        begin = max(0, whole - 4096)
        line_end = os.pread(file, whole - begin, begin).rfind(b"\n")
        if line_end >= 0:
            whole = begin + line_end + 1
            break
        whole = begin
    if whole < size:
        os.ftruncate(file, whole)
    return file


def _append(file: int, lines: bytes) -> None:
    """Append all of it or nothing. Raises OSError where there is no room."""
    begin, written = os.fstat(file).st_size, 0
    try:
        while written < len(lines):
            written += os.write(file, lines[written:])
    except OSError:
        if written:
            os.ftruncate(file, begin)
        raise
