"""Lets an engine that only waits for handoffs sleep until there is news, instead of stepping in a circle.

vLLM steps an engine as long as it has requests, also when none of them can be computed. The step is therefore held in
`build_connector_meta` until the channel has news or the engine has input: both are waited for at the condition of the
engine's own input queue.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from typing import Any


class Rest:
    """Create it where the engine core creates its scheduler."""

    def __init__(self) -> None:
        self._inputs = engine_inputs()

    def wake(self) -> None:
        """There is news. For any thread."""
        with self._inputs.not_empty:
            self._inputs.not_empty.notify_all()

    def wait(self, has_news: Callable[[], bool], timeout_s: float) -> None:
        """Wait for news or for input of the engine."""
        with self._inputs.not_empty:
            self._inputs.not_empty.wait_for(lambda: has_news() or self._inputs._qsize() > 0, timeout_s)


def engine_inputs() -> queue.Queue[Any]:
    """The input queue of the engine core that is being made further up the stack. A queue of nobody's if there is none.

    vLLM hands a connector no reference to it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        inputs = getattr(frame.f_locals.get("self"), "input_queue", None)
        if isinstance(inputs, queue.Queue):
            return inputs
        frame = frame.f_back  # type: ignore[assignment]
    return queue.Queue()
