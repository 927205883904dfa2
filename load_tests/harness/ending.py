"""How a command that starts processes ends: with all of them, and with its folder."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


async def in_a_folder(run: Callable[[Path], Awaitable[T]]) -> T:
    """Run it with a folder of its own. SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        return await run(Path(folder))
