"""The names that vLLM gives sockets and shared memory while engines start, and leaves behind.

Every engine would leave three files of sockets, however it ends; on CPU every worker of several its buffer in
`/dev/shm`; and one that is killed the queues between its processes, 160 MiB and more. A name is needed until who looks
for it has found it, which is when an engine has started.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from deployments.processes import descendants

FOLDER = "VLLM_RPC_BASE_PATH"
SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("psm_", "vllm_dist_")  # Python's own for what has no name, and that of vLLM's CPU communicator

_lock = threading.Lock()
_starting = 0
_made = contextlib.ExitStack()


@contextlib.contextmanager
def names_until_started() -> Iterator[None]:
    """A folder for the sockets of engines that this process starts.

    It is gone once none is starting any more, and so are the names of the shared memory that engines have: an end, a
    kill included, leaves nothing.
    """
    global _starting
    with _lock:
        if not _starting:
            chosen = os.environ.get(FOLDER)
            folder = _made.enter_context(tempfile.TemporaryDirectory(prefix="baton-", dir=chosen))
            _made.callback(_set, chosen)
            _set(folder)
        _starting += 1
    try:
        yield
    finally:
        with _lock:
            _starting -= 1
            if not _starting:
                _made.close()
                remove(shared_memory_of(descendants(os.getpid())))


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


def _set(folder: str | None) -> None:
    os.environ.pop(FOLDER, None)
    if folder is not None:
        os.environ[FOLDER] = folder
