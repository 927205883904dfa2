"""The processes of this machine, from Linux's `/proc`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def descendants(root: int) -> set[int]:
    """Every process below `root`, without `root`."""
    above, found = parents(), {root}
    while more := {pid for pid, parent in above.items() if parent in found} - found:
        found |= more
    return found - {root}


def parents() -> dict[int, int]:
    """The parent of every process."""
    found = ((int(entry.name), stat(int(entry.name))) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {pid: int(fields[1]) for pid, fields in found if fields}


def marked(entry: str) -> set[int]:
    """Every process except this one that has `entry`, a `NAME=value`, in its environment."""
    found = set()
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit() and int(directory.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if entry.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found.add(int(directory.name))
    return found


def stat(pid: int) -> list[str] | None:
    """`/proc/PID/stat` from its third field on (state, parent, ...; the 20th is the start time); None: no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
