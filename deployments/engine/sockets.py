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
_made: contextlib.ExitStack | None = None


@contextlib.contextmanager
def socket_folder() -> Iterator[None]:
    """A folder for the sockets of engines that this process starts; it is gone once none is starting any more.

    What is connected by then needs no name: an end, a kill included, leaves nothing.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _starting, _made
    with _lock:
        if _made is None:
            _made = contextlib.ExitStack()
            _made.callback(_restore, os.environ.get(FOLDER))
            folder = tempfile.TemporaryDirectory(prefix="baton-", dir=os.environ.get(FOLDER))
            os.environ[FOLDER] = _made.enter_context(folder)
        _starting += 1


def _leave() -> None:
    global _starting, _made
    with _lock:
        _starting -= 1
        if not _starting and _made is not None:
            made, _made = _made, None
            made.close()


def _restore(folder: str | None) -> None:
    if folder is None:
        os.environ.pop(FOLDER, None)
    else:
        os.environ[FOLDER] = folder
