"""How far a batch is in its input file, where windows of lines overlap. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from app.batches.records import Scan


@dataclass
class Window:
    """Lines that were begun together. `end`: the place after the last of them. `left`: those without an answer."""

    end: Scan
    left: int


class Progress:
    """`scan`: all lines before are answered; a new ingress begins there."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self._open: deque[Window] = deque()

    def begin(self, end: Scan, lines: int) -> Window:
        """A window of so many lines that have no answer begins."""
        window = Window(end, lines)
        self._open.append(window)
        self._advance()
        return window

    def answered(self, window: Window) -> None:
        """One more line of a window has its answer."""
        window.left -= 1
        self._advance()

    def _advance(self) -> None:
        while self._open and not self._open[0].left:
            self.scan = self._open.popleft().end
