"""Shared memory that processes have, by its names in `/dev/shm`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("psm_", "vllm_dist_")  # Python's own for what has no name, and that of vLLM's CPU communicator


def shared_memory_of(pids: Iterable[int], prefixes: tuple[str, ...] = PREFIXES) -> set[Path]:
    """The files in `/dev/shm` whose names begin so and that these processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SHARED_MEMORY and path.name.startswith(prefixes):
                    found.add(path)
    return {path for path in found if path.exists()}  # what has lost its name is called "... (deleted)" there


def remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
