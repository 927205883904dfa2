"""Lets an idle engine hear every signal.

CPython runs a signal's handler when the main thread next runs Python code. A signal that arrives when that thread has
just given up the interpreter's lock, but does not sleep yet, does not end its sleep. vLLM's engine core then waits for
its next request with SIGTERM pending, until it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable


def wake_on_signals(wake: Callable[[], None]) -> bool:
    """From now on a thread calls `wake` after each signal. It makes the main thread run Python code.

    Returns False, and does nothing, except in the main thread of a process of its own, as an engine core's is: there is
    one such descriptor in a process, and an event loop may need it.
    """
    if multiprocessing.parent_process() is None or threading.current_thread() is not threading.main_thread():
        return False
    read, write = os.pipe()
    os.set_blocking(write, False)  # a signal handler must not wait
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)
        return False

    def watch() -> None:
        while os.read(read, 4096):
            wake()

    threading.Thread(target=watch, name="baton-signals", daemon=True).start()
    return True
