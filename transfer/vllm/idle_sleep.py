"""Lets an engine that only waits for handoffs sleep until there is news, instead of stepping in a circle.

vLLM steps an engine as long as it has requests, even when none of them can be computed. The step is therefore held in
`build_connector_meta` until the channel has news or the engine has input. The condition of the engine's own input
queue is notified of both.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from typing import Any


class IdleSleep:
    """Make it while the engine core makes its scheduler: it looks for the engine core further up the stack."""

    def __init__(self) -> None:
        self._inputs = engine_inputs()

    def wake(self) -> None:
        """There is news. Any thread may call this."""
        with self._inputs.not_empty:
            self._inputs.not_empty.notify_all()

    def wait(self, has_news: Callable[[], bool], timeout_s: float) -> None:
        """Wait for news or for input of the engine, at most `timeout_s`."""
        with self._inputs.not_empty:
            self._inputs.not_empty.wait_for(lambda: has_news() or self._inputs._qsize() > 0, timeout_s)


def engine_inputs() -> queue.Queue[Any]:
    """The input queue of the engine core that is being made further up the stack; an unused queue if there is none.

    vLLM hands a connector no reference to the queue.
    """
    frame = sys._getframe(1)
    while frame is not None:
        inputs = getattr(frame.f_locals.get("self"), "input_queue", None)
        if isinstance(inputs, queue.Queue):
            return inputs
        frame = frame.f_back  # type: ignore[assignment]
    return queue.Queue()
