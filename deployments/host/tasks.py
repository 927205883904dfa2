"""Tasks that have an owner. None ends unseen."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("baton.tasks")


class OwnTasks:
    """Starts tasks in a private context, which is that of the moment when this object was made.

    What a client's request began must outlive the request, so that it can be closed. When a client goes away, Serve and
    Ray cancel every call made in the context of its request: a call that tells the session manager so would be lost.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task. If it ends in an error, the error is logged."""
        task = asyncio.create_task(work, name=f"baton-{name}", context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def cancel(self) -> None:
        """Cancel every task that runs now."""
        for task in self._tasks:
            task.cancel()

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s ended: %r", task.get_name(), error, exc_info=error)
