"""Cyclic garbage is collected seldom, between two pieces of work, and not while a process starts.

A process that keeps the small objects of ten thousand sessions spends a millisecond or two on every seven hundred new
ones, in the middle of its work. It finds nothing to free: reference counts free nearly everything.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

EVERY_S = 600.0  # between two collections
MOST_NEW = 500_000  # new containers alive, some hundred megabytes, before the next collection comes early


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """A process's start, in which nothing is collected automatically.

    What is there afterwards stays for the process's life (modules, classes, tables; a million objects with vLLM). No
    later collection looks at it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules complain about objects that are never freed
        if was_on:
            gc.enable()


class Collector:
    """Turns automatic collection off for the whole process.

    `tick` collects everything every `every_s` seconds, and sooner once `most_new` more containers are alive than after
    the last collection.
    """

    def __init__(self, every_s: float = EVERY_S, most_new: int = MOST_NEW) -> None:
        gc.disable()
        self._every_s, self._most_new = every_s, most_new
        self._last_s: float | None = None

    def tick(self, now_s: float) -> bool:
        """Call it often, between two pieces of work. Returns whether it collected."""
        if self._last_s is None:
            self._last_s = now_s
        if now_s - self._last_s < self._every_s and gc.get_count()[0] < self._most_new:
            return False
        self._last_s = now_s
        gc.collect()
        return True
