"""Shared memory that processes have, by its names in `/dev/shm`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("psm_", "vllm_dist_")  # Python's own for what has no name, and that of vLLM's CPU communicator
SEMAPHORES = "sem.mp-"
"""Python's: who made one takes its name away when it ends, unless it is killed together with its resource tracker."""


def shared_memory_of(pids: Iterable[int], prefixes: tuple[str, ...] = PREFIXES) -> set[Path]:
    """The files in `/dev/shm` whose names begin so and that these processes have mapped.

    By inode: who makes a semaphore has mapped it by a name that it no longer has (glibc's `sem_open`).
    """
    mapped = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)  # addresses, access, offset, device, inode, path
                if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                    mapped.add(int(fields[4]))
    return {entry for entry in SHARED_MEMORY.iterdir() if entry.name.startswith(prefixes) and _inode(entry) in mapped}


def _inode(file: Path) -> int | None:
    try:
        return file.stat().st_ino
    except FileNotFoundError:
        return None


def remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
