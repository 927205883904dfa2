"""What batches count: lines by what became of them, and the batches that run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Sized

from app.batches.line_rows import Result
from deployments.metrics.catalogue import BATCH_LINES, BATCHES
from deployments.metrics.registry import Registry

LOOK_S = 1.0


class BatchMeter:
    """`registry`: of this process."""

    def __init__(self, registry: Registry) -> None:
        self._lines = {is_ok: registry.value(BATCH_LINES, outcome=name) for is_ok, name in _OUTCOMES.items()}
        self._running = registry.value(BATCHES)

    def noted(self, results: Sequence[Result]) -> None:
        """Lines were answered."""
        for result in results:
            self._lines[result.is_ok].add()

    async def follow(self, runner: Sized) -> None:
        """Count what runs, until this is cancelled."""
        while True:
            self._running.set(float(len(runner)))
            await asyncio.sleep(LOOK_S)


_OUTCOMES = {True: "completed", False: "failed"}
