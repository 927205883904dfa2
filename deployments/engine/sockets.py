"""Where vLLM makes its Unix sockets. It removes none of them: each engine would leave three files behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator

FOLDER = "VLLM_RPC_BASE_PATH"

_lock = threading.Lock()
_starting = 0
_made = contextlib.ExitStack()


@contextlib.contextmanager
def socket_folder() -> Iterator[None]:
    """A folder for the sockets of engines that this process starts; it is gone once none is starting any more.

    What is connected by then needs no name: an end, a kill included, leaves nothing.
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


def _set(folder: str | None) -> None:
    os.environ.pop(FOLDER, None)
    if folder is not None:
        os.environ[FOLDER] = folder
