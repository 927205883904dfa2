"""Engine processes must not outlive the replica that started them, however the replica dies."""

from __future__ import annotations

import multiprocessing
import os
import select
import threading


def die_with_parent() -> None:
    """End this process at once when its parent process ends. It costs one thread, which sleeps in the kernel.

    A process of `multiprocessing` knows the one that started it. So it also ends here where that one has ended before,
    while this one was starting. Any other process can only tell from now on.
    """
    starter = multiprocessing.parent_process()
    parent = (starter and starter.pid) or os.getppid()
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:  # the number may be another process's by now
        os._exit(1)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="baton-lifeline", daemon=True).start()
