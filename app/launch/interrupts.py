"""What Ctrl-C, SIGTERM and SIGHUP do to the launcher: the first ends it, the second warns, the third kills."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WARNING = b"ending; once more to kill\n"


class Interrupts:
    """A signal handler that raises KeyboardInterrupt when the launcher is to end, and again when it is to kill.

    Once the end has begun, for any reason, an interrupt prints a warning, and the next one raises KeyboardInterrupt
    inside of `ending`. No interrupt raises anywhere else, so none prints a traceback.
    """

    def __init__(self) -> None:
        self._ending = self._killable = self._warned = False

    def install(self) -> None:
        """Handle the three signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self)

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._ending:
            self._ending = True
            raise KeyboardInterrupt
        if self._warned and self._killable:
            self._killable = False
            raise KeyboardInterrupt
        self._warned = True
        with contextlib.suppress(OSError):
            os.write(1, _WARNING)  # not `print`: a signal may arrive inside of another one

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Inside, the launcher ends in good order, and one interrupt after the warning raises KeyboardInterrupt."""
        self._ending = self._killable = True
        try:
            yield
        finally:
            self._killable = False
