"""What a replica is doing: whether its start is held back, whether it serves, and the error that broke it."""

from __future__ import annotations

import asyncio
import contextlib

from deployments.engine.protocol import EngineCrashed, EngineError
from deployments.messages import Phase


class Lifecycle:
    """A replica's phase. The reporter passes on what the manager says to a replica that starts (`heard`, `unheard`).

    `is_starting`: Serve does not know of the replica yet. `error`: what ended one of the replica's tasks.
    """

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.is_starting = True
        self.is_stopping = False
        self.error: BaseException | None = None
        self._is_parked = False
        self._held: dict[Phase, bool] = {}  # the manager's last answer to a report from each phase
        self._has_answer = asyncio.Event()

    @property
    def serves(self) -> bool:
        """Whether the engine works for sessions. It does while draining too: some were placed here before that was
        known.
        """
        return self.phase is not Phase.LOADING and self.error is None and not self.is_stopping

    @property
    def is_held(self) -> bool:
        """Whether the manager has said that the start must not go on yet."""
        return self._held.get(self.phase, False)

    def park(self, drain: bool) -> bool:
        """Drain for an operator, or serve again. Returns whether the phase has changed.

        A replica that drains for another reason, as one that Serve stops, stays as it is.
        """
        if drain == self._is_parked or self.phase is not (Phase.READY if drain else Phase.DRAINING):
            return False
        self._is_parked, self.phase = drain, Phase.DRAINING if drain else Phase.READY
        return True

    def leave(self) -> None:
        """Drain for good."""
        self._is_parked, self.phase = False, Phase.DRAINING

    def heard(self, phase: Phase, hold: bool) -> None:
        """Note the manager's answer to a report from this phase. `hold`: the start must not go on yet."""
        self._held[phase] = hold
        self._has_answer.set()

    def unheard(self, phase: Phase) -> None:
        """Note that the manager has not answered a report. If it never said to wait, the start goes on without it."""
        self._held.setdefault(phase, False)
        self._has_answer.set()

    async def while_held(self, timeout_s: float) -> None:
        """Wait while the manager holds this phase back. Raises EngineError when the replica fails meanwhile.

        Serve stops an old replica as soon as its successor has started. A replica that has no partner to pair with must
        not count as started: the old pair serves until both sides of the new one are ready.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._held.get(self.phase) is not False and self.error is None:
                    self._has_answer.clear()
                    await self._has_answer.wait()
        self.refuse_if_failed()

    def fail(self, error: BaseException) -> None:
        """Mark the replica as broken. Serve replaces it; until then nothing may be placed on it."""
        self.error = error
        self.leave()
        self._has_answer.set()

    def refuse_if_failed(self) -> None:
        """Raises EngineError when the replica is broken."""
        if self.error is not None:
            raise failure(self.error) from self.error


def failure(error: BaseException) -> EngineError:
    """What a part is told of the error that has broken its replica."""
    kind = EngineCrashed if isinstance(error, EngineCrashed) else EngineError
    return kind(f"the replica failed: {error}")
