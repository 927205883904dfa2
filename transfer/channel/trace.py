"""A timeline of handoffs, layers and forward passes: one JSON object per line, for tests and for people."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


def tracer(directory: str | None, name: str) -> Callable[..., None] | None:
    """A function that appends `{"t": seconds, "event": ..., **fields}` to `directory/name.jsonl`.

    Returns None when `directory` is None. Times are those of the machine's monotonic clock, so the lines of several
    processes on one machine can be compared.
    """
    if directory is None:
        return None
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    file = (path / f"{name}.jsonl").open("a", buffering=1)

    def trace(event: str, **fields: object) -> None:
        file.write(json.dumps({"t": time.monotonic(), "event": event, **fields}) + "\n")

    return trace
