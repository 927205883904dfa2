"""What follows when a placement of a session has come to nothing: another placement, or an error. Pure.

A `Recovery` counts the placements of one session. The caller tells it of each placement that ended without the end of
the answer, and does what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.cluster.timings import Timings
from deployments.errors import EngineFault, Moved, SessionError

ENGINES_ASKED = 2
"""After errors of so many engines, which say nothing of the request, the request counts as their cause."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How often one session may be placed.

    `losses_in_a_row`: lost placements in a row; the last of them fails the session. A placement that gave more than a
    first token begins a new row: prefill gives a first token wherever decode fails. `placements`: placements in all,
    without moves, however many tokens each gave, because a request that kills its engines must not go on for ever.
    `moves`: moves of one session; a further move counts as a loss.
    """

    losses_in_a_row: int = 4
    placements: int = 32
    moves: int = 16


@dataclass(frozen=True, slots=True)
class Again:
    """Place the session again after `pause_s` seconds.

    `moved_from`: the replica that gave the session up and hands its KV over; "" after a loss.
    """

    moved_from: str
    pause_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """The session fails with this error."""

    error: SessionError


@dataclass(slots=True)
class Recovery:
    """Counts the placements of one session. `losses`: placements lost in a row. `faults`: errors of engines."""

    limits: Limits
    timings: Timings
    placements: int = 0
    moves: int = 0
    losses: int = 0
    faults: int = 0

    def ended(self, error: SessionError, progressed: bool, answered: bool, rule: str, moved_from: str) -> Again | Fail:
        """A placement has come to nothing, through no fault of the request.

        `error`: why; `Moved` when a replica gave the session up. `progressed`: this placement gave more than a first
        token. `answered`: the client has at least one token. `rule`: why an answer that has begun cannot go on
        elsewhere; "" when it can. `moved_from`: the replica that gave the session up.
        """
        self.placements += 1
        if isinstance(error, Moved) and self.moves < self.limits.moves:
            self.moves += 1
            return Again(moved_from, 0.0)
        self.losses = 1 if progressed else self.losses + 1
        self.faults += isinstance(error, EngineFault)
        if (why := self._why_final(rule if answered else "")) is not None:
            return Fail(type(error)(f"{error}{why}"))
        return Again("", self._pause_s())

    def _why_final(self, rule: str) -> str | None:
        """Why the session is not placed again, as the end of a sentence; None when it is."""
        if self.faults >= ENGINES_ASKED:
            return f", and so in {self.faults} engines"
        if self.losses >= self.limits.losses_in_a_row:
            return f", and so in each of {self.losses} placements" if self.losses > 1 else ""
        if self.placements - self.moves >= self.limits.placements:
            return f", the last of {self.placements} placements"
        return f"; what was answered so far cannot go on elsewhere ({rule})" if rule else None

    def _pause_s(self) -> float:
        """The second placement of a row follows at once, the third after a pause, which then doubles each time."""
        if self.losses < 2:
            return 0.0
        return min(self.timings.pause_s * 2.0 ** (self.losses - 2), self.timings.longest_pause_s)
