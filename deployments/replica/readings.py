"""What an engine last said of itself, for the next report."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace

from deployments.engine.protocol import Engine, EngineError, EngineLoad, Step
from deployments.messages import StepSample

STEPS_KEPT = 64
"""The most steps in one report; older ones are dropped."""
OPEN_KV = ("open_receiving", "open_writing")
"""The counters of open KV transfers: of those that come in, and of those that go out."""
OPEN_TIERS = "tier_open_jobs"
"""The counter of what an engine's KV tiers have still to store or to load."""


class Readings:
    """`load`: what the engine said in its last step."""

    def __init__(self, engine: Engine) -> None:
        self.load = EngineLoad()
        self._engine = engine
        self._counters: dict[str, float] = {}
        self._steps: deque[StepSample] = deque(maxlen=STEPS_KEPT)
        self._is_settled = False

    @property
    def counters(self) -> dict[str, float]:
        """The engine's counters and its KV channel's."""
        return self._counters | self.load.counters

    @property
    def idle_load(self) -> EngineLoad:
        """The load of an engine without sessions.

        Nothing is in use but what is pinned. Its last step may say otherwise, because some engines report before they
        free blocks. Until its KV transfers are over, the load of its last step counts.
        """
        if not self._is_settled:
            return self.load
        pinned = sum(self.load.pinned.values())
        return replace(self.load, used_blocks=pinned, running=0, waiting=0, running_tokens=0, deferred=0)

    def take(self, step: Step) -> None:
        """Take in a step that the engine has made."""
        self.load = step.load
        self._steps.extend(step.steps)

    def take_steps(self) -> tuple[StepSample, ...]:
        """The steps since the last call."""
        steps = tuple(self._steps)
        self._steps.clear()
        return steps

    def unsettle(self) -> None:
        """A session has ended, so the counters are out of date."""
        self._is_settled = False

    async def refresh(self) -> None:
        """Read the counters of an engine that works. It may be too busy, or dead: then they stay as they were."""
        with contextlib.suppress(TimeoutError, EngineError):
            self._counters = await self._engine.counters()

    async def settle(self) -> None:
        """Read the counters once after the engine has become idle. Asking costs the engine a moment."""
        if self._is_settled:
            return
        try:
            self._counters = await self._engine.counters()
        except TimeoutError:  # it has work again, and is asked at its next idle moment
            return
        self._is_settled = not any(self._counters.get(name) for name in OPEN_KV)
