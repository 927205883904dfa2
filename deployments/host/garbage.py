"""Cyclic garbage is collected seldom, between two pieces of work, and not while a process starts.

A process that keeps ten thousand sessions' small objects pays a millisecond or two for every seven hundred new ones, in
the midst of whatever it is doing, and finds nothing: reference counts free nearly all.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

EVERY_S = 600.0
MOST_NEW = 500_000


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """A process's start. Nothing is collected automatically within; what is there afterwards (modules, classes, tables,
    a million objects with vLLM) is there to stay, and no collection looks at it again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules complain of what is never collected
        if was_on:
            gc.enable()


class Collector:
    """Turns automatic collection off, for the whole process. `tick` collects all of it every `every_s` seconds, and
    sooner when `most_new` more containers are alive than after the last time, some hundred megabytes.
    """

    def __init__(self, every_s: float = EVERY_S, most_new: int = MOST_NEW) -> None:
        gc.disable()
        self._every_s, self._most_new = every_s, most_new
        self._last_s: float | None = None

    def tick(self, now_s: float) -> bool:
        """Call it often, between two pieces of work. Whether it collected."""
        if self._last_s is None:
            self._last_s = now_s
        if now_s - self._last_s < self._every_s and gc.get_count()[0] < self._most_new:
            return False
        self._last_s = now_s
        gc.collect()
        return True
