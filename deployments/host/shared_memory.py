"""The shared memory of processes, by its names in `/dev/shm`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("psm_", "vllm_dist_")  # of Python's unnamed shared memory, and of vLLM's CPU communicator
SEMAPHORES = "sem.mp-"
"""Of Python's semaphores. A process removes the names of its own when it ends, unless it is killed together with its
resource tracker."""


def shared_memory_of(pids: Iterable[int], prefixes: tuple[str, ...] = PREFIXES) -> set[Path]:
    """The files in `/dev/shm` that these processes have mapped and whose names begin with one of `prefixes`.

    They are found by inode: a process that made a semaphore has mapped it by a name that the file no longer has
    (glibc's `sem_open`).
    """
    mapped = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
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
    """Delete these files; it is no error when one is gone."""
    for file in files:
        file.unlink(missing_ok=True)
