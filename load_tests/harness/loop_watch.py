"""How long an event loop is held, and by what: a beat that comes late, and a look at the stack meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence

import numpy as np

BEAT_S = 0.005
HELD_S = 0.03
"""A beat that is later than this is a hold, and its stack is noted."""
FRAMES = 6


class LoopWatch:
    """Watches the event loop in which it is made, until `close`.

    The stack is that of the loop's thread at the time of a look. While C code holds the interpreter's lock, no look is
    possible, and the stack is what runs next; the length of the hold is right all the same.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._late_s: list[float] = []
        self._stacks: Counter[str] = Counter()
        self._beaten_s = time.monotonic()
        self._closed = threading.Event()
        self._beat = self._loop.call_later(BEAT_S, self._on_beat)
        self._looker = threading.Thread(target=self._look, name="loop-watch", daemon=True)
        self._looker.start()

    def close(self) -> None:
        """Stop watching."""
        self._beat.cancel()
        self._closed.set()
        self._looker.join()

    def take(self) -> tuple[dict[str, float], list[str]]:
        """The figures since the last call, in ms, and the stacks that held the loop, the most frequent first."""
        late_s, self._late_s = self._late_s, []
        stacks, self._stacks = self._stacks, Counter()
        p50, p99, longest = _percentiles(late_s)
        held = sum(late > HELD_S for late in late_s)
        figures = {"p50_ms": p50, "p99_ms": p99, "longest_ms": longest, "holds": held}
        return figures, [f"{count} looks: {stack}" for stack, count in stacks.most_common(12)]

    def _on_beat(self) -> None:
        now_s = time.monotonic()
        self._late_s.append(now_s - self._beaten_s - BEAT_S)
        self._beaten_s = now_s
        self._beat = self._loop.call_later(BEAT_S, self._on_beat)

    def _look(self) -> None:
        while not self._closed.wait(BEAT_S):
            if time.monotonic() - self._beaten_s < HELD_S:
                continue
            if (frame := sys._current_frames().get(self._thread)) is not None:
                stack = traceback.extract_stack(frame)[-FRAMES:]
                self._stacks[
                    " < ".join(f"{each.name} {_short(each.filename)}:{each.lineno}" for each in stack[::-1])
                ] += 1


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def _percentiles(late_s: Sequence[float]) -> tuple[float, float, float]:
    found = np.percentile(np.array(late_s or [0.0]) * 1e3, (50, 99, 100))
    p50, p99, longest = (round(float(each), 1) for each in found)
    return p50, p99, longest
