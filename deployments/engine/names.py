"""The names that vLLM gives sockets and shared memory while engines start, and leaves behind.

Every engine would leave three files of sockets, however it ends; on CPU every worker of several its buffer in
`/dev/shm`; and an engine that is killed would leave the queues between its processes, 160 MiB and more. A name is
needed only until the engine's processes have found it, which is when the engine has started.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator

from deployments.host.processes import descendants
from deployments.host.shared_memory import remove, shared_memory_of

FOLDER = "VLLM_RPC_BASE_PATH"
LONGEST = 107 - len("/baton-12345678") - len("/00000000-0000-0000-0000-000000000000")
"""The longest path of a folder for temporary files that our sockets fit in: a socket's path has 107 bytes on Linux.

Below that folder come our own folder and a UUID, by which vLLM names the socket."""

_lock = threading.Lock()
_starting = 0
_made = contextlib.ExitStack()


@contextlib.contextmanager
def names_until_started() -> Iterator[None]:
    """A folder for the sockets of engines that this process starts.

    It is removed once no engine is starting any more, and so are the names of the engines' shared memory. An engine
    that ends then leaves nothing, even when it is killed.
    """
    global _starting
    with _lock:
        if not _starting:
            chosen = os.environ.get(FOLDER)
            folder = _made.enter_context(tempfile.TemporaryDirectory(prefix="baton-", dir=chosen or _temporary()))
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


def _temporary() -> str:
    """The folder for temporary files, or where Ray has its sockets if that is too deep for a socket."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= LONGEST else "/tmp"


def _set(folder: str | None) -> None:
    os.environ.pop(FOLDER, None)
    if folder is not None:
        os.environ[FOLDER] = folder
