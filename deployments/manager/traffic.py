"""What becomes of every session, for a trace of the traffic: one line for each, however often it is placed.

A session's line is made when the session is over. What the manager is told of a lost or moved placement is not the
end of its session: another placement mostly follows, within `FOLLOWED_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployments.messages import MANAGER_RETIRES, Admit, Reject, SessionRequest

FOLLOWED_S = 60.0
"""Seconds after the end of a placement within which its session opens the next one. It pauses for less than that, and
none waits for longer in the waiting room as it is set by default."""

ENDS = frozenset({"stop", "length", "abort", "error", "cancelled", "failed"})
"""The outcomes of a placement after which its session is over. An abandoned one may come back: its caller may have
turned to its stand-in for a moment."""
UNKNOWN_CLASS = "unknown_class"
"""The code of the refusal of a class that is not configured."""
UNFINISHED = "unfinished"
"""The outcome of a session that was open when its manager ended."""


@dataclass(frozen=True, slots=True)
class Line:
    """A session that is over. `at_s`: its arrival, by the manager's clock. `hashes`: as in `SessionRequest`.

    `output_tokens`: what is known to be answered; 0 where nothing is. `outcome`: how its last placement ended, or
    "refused" with the refusal's code behind a colon. `priority`: "" where the client named a class that there is not.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    hashes: tuple[int, ...]
    priority: str
    outcome: str


@dataclass(slots=True)
class _Session:
    """`epoch`: of its last placement; 0 before the first. `answered`: tokens before that, and `output_tokens` in it."""

    request: SessionRequest
    at_s: float
    epoch: int = 0
    answered: int = 0
    output_tokens: int = 0
    outcome: str = UNFINISHED

    def line(self, default_class: str) -> Line:
        """Its line. A class that is not configured is the client's own text, and left out."""
        request = self.request
        priority = "" if self.outcome == f"refused:{UNKNOWN_CLASS}" else request.priority or default_class
        tokens = self.answered + self.output_tokens
        return Line(
            self.at_s, request.prompt_tokens, tokens, request.max_tokens, request.hashes, priority, self.outcome
        )


class Traffic:
    """Told what happens to sessions. `write` gets the line of each session that is over, once; None: nothing is kept.

    `default_class`: the class of requests that name none. Sessions whose first placement another manager made are left
    out.
    """

    def __init__(self, write: Callable[[Line], None] | None = None, default_class: str = "") -> None:
        self._write, self._default_class = write, default_class
        self._sessions: dict[str, _Session] = {}
        self._ended_s: dict[str, float] = {}  # since when a session has no placement, in the order of time

    def __len__(self) -> int:
        return len(self._sessions)

    def opened(self, request: SessionRequest, now_s: float) -> None:
        """A session asks for a place, for the first time or again."""
        if self._write is None:
            return
        session = self._sessions.get(request.session_id)
        if session is not None:
            self._ended_s.pop(request.session_id, None)
            session.answered, session.output_tokens = request.answered_tokens, 0
            if session.epoch:
                session.epoch += 1  # the last placement's end may be told later, and is counted here
        elif request.attempt == 1:
            self._sessions[request.session_id] = _Session(request, now_s)

    def decided(self, session_id: str, decision: Admit | Reject) -> None:
        """A session has a place, or is refused. One that is to ask another manager is left to that one."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        if isinstance(decision, Admit):
            self._ended_s.pop(session_id, None)
            session.epoch, session.outcome = decision.placement.epoch, UNFINISHED
        elif decision.code != MANAGER_RETIRES:
            session.outcome = f"refused:{decision.code}" if decision.code else "refused"
            self._over(session_id)
        elif not session.epoch:
            del self._sessions[session_id]

    def closed(
        self, session_id: str, outcome: str, now_s: float, epoch: int | None = None, output_tokens: int | None = None
    ) -> None:
        """A placement is over. `epoch`: which one; None: the last one. A session that is not known changes nothing."""
        session = self._sessions.get(session_id)
        if session is None or (epoch is not None and epoch < session.epoch):
            return
        session.outcome, session.output_tokens = outcome, output_tokens or 0
        self._ended_s.pop(session_id, None)
        self._ended_s[session_id] = now_s
        if outcome in ENDS:
            self._over(session_id)

    def sweep(self, now_s: float) -> None:
        """Write the sessions that no placement has followed in time; cheap to call often."""
        while self._ended_s:
            session_id, ended_s = next(iter(self._ended_s.items()))
            if now_s - ended_s <= FOLLOWED_S:
                return
            self._over(session_id)

    def end(self) -> None:
        """The manager ends: write what is open. Other managers will hear of the ends of those sessions."""
        for session_id in list(self._sessions):
            self._over(session_id)

    def _over(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        self._ended_s.pop(session_id, None)
        assert self._write is not None
        self._write(session.line(self._default_class))
