"""One placement of a session as a pure state machine: events in, effects out.

An `Attempt` owns it and carries out the effects. `ALLOWED` is the table of legal events; an illegal event raises
`IllegalEvent` and changes nothing. Outputs are opaque here. A prefill output carries the first token; decode outputs
that overtake it on the way are held back until it has been delivered. Where decode pulls the KV cache, it is started
with prefill's output and gives every token itself.

A placement that is LOST through no fault of the request can be followed by another, with a machine of its own. What is
said of the old one after that changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deployments.errors import EngineFault, HandoffFailed, Moved, ReplicaLost, RequestFault, SessionError
from deployments.messages import MOVED, Handoff, Mode, Role


class IllegalEvent(Exception):
    """An error in the caller: this event cannot happen in this state."""


class State(StrEnum):
    """LANDING: the first token is out, and nothing says yet that the KV cache is where decode needs it.

    LOST: the placement came to nothing, and the client has not been told of an end. FOLLOWED: another placement has
    taken over. OVER: the session was answered, failed or was cancelled. CLOSED: nothing runs any more, and the
    reservations are released.
    """

    OPENING = "opening"
    PREFILLING = "prefilling"
    PULLING = "pulling"
    LANDING = "landing"
    DECODING = "decoding"
    LOST = "lost"
    FOLLOWED = "followed"
    OVER = "over"
    CLOSED = "closed"


class Finish(StrEnum):
    """Why an engine ended its part, in the terms that matter to the session."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


_PLACED = frozenset(State) - {State.OPENING}
_ENDED = frozenset({State.LOST, State.FOLLOWED, State.OVER, State.CLOSED})

ALLOWED: dict[str, frozenset[State]] = {
    "placed": frozenset({State.OPENING}),
    "output": _PLACED,
    "reported": _PLACED,
    "replica_lost": _PLACED,
    "lost": _PLACED,
    "failed": frozenset(State),
    "cancelled": frozenset(State),
    "interrupted": frozenset(State),
    "followed": frozenset({State.LOST}),
    "closed": frozenset({State.FOLLOWED, State.OVER}),
}


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give an output to the frontend. `finish`: whether its finish reason stands."""

    output: Any
    finish: bool


@dataclass(frozen=True, slots=True)
class PrefillOver:
    """The prompt is computed: the replica that did it has that much less to do."""


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Start the decode replica's part. `output`: prefill's, which says where decode finds the KV cache."""

    output: Any


@dataclass(frozen=True, slots=True)
class EndPrefill:
    """Decode has the KV cache: prefill need not hold its blocks any longer."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client that there will be no (more) answer."""

    error: SessionError


@dataclass(frozen=True, slots=True)
class Over:
    """End the parts that are still open on the replicas; the placement comes to no other end."""

    outcome: str


Effect = Deliver | PrefillOver | StartDecode | EndPrefill | Fail | Over


@dataclass(slots=True)
class Session:
    """Every placement is over exactly once, with one `Over`.

    `held`: decode outputs that wait for the first token. `outcome`: how the placement ended, "" before that. `error`:
    why it was lost. `owner_ended`: the replica that writes the end of the answer has said that it holds nothing of the
    session any more.
    """

    session_id: str
    handoff: Handoff = Handoff.PUSHED
    mode: Mode | None = None
    state: State = State.OPENING
    held: list[tuple[Any, Finish | None]] = field(default_factory=list)
    outcome: str = ""
    error: SessionError | None = None
    owner_ended: bool = False

    @property
    def is_over(self) -> bool:
        """Nothing more comes of this placement."""
        return self.state in _ENDED

    @property
    def owner(self) -> Role:
        """The role that writes the end of the answer."""
        return Role.PREFILL if self.mode is Mode.PREFILL_LOCAL else Role.DECODE

    # ---- the placement runs

    def placed(self, mode: Mode) -> list[Effect]:
        """Admission has placed the session."""
        self._check("placed")
        self.mode = mode
        self.state = State.PREFILLING
        return []

    def output(self, role: Role, output: Any, finish: Finish | None, fault: str = "") -> list[Effect]:
        """An engine of the session produced something. `fault`: what it has against the request, if anything."""
        self._check("output")
        if finish is not None:
            self._note_end(role)
        if self.is_over:
            return []
        if self._split and role is Role.PREFILL and self.state is not State.PREFILLING:
            return []  # prefill has given all that the session takes from it
        if finish is Finish.ERROR:
            return self.failed(RequestFault(fault)) if fault else self.lost(self._engine_error(role))
        if finish is Finish.ABORT:  # the core has not asked for that
            return self.lost(ReplicaLost(f"the {role} engine gave the request up"))
        if self._split and self.state is State.PREFILLING:
            return self._before_first(role, output, finish)
        return self._go_on(output, finish)

    def goes_on(self, role: Role) -> bool:
        """Whether an output of this role, without a finish, is delivered and changes nothing else."""
        return self.state is State.DECODING and role is self.owner

    def _engine_error(self, role: Role) -> SessionError:
        """Decode's error before its first token is a handoff that failed. Any other one is the engine's own."""
        handing_over = self._split and role is Role.DECODE and self.state is not State.DECODING
        error = HandoffFailed if handing_over else EngineFault
        return error(f"the {role} engine could not go on with the request")

    def _before_first(self, role: Role, output: Any, finish: Finish | None) -> list[Effect]:
        if role is Role.DECODE:
            self.held.append((output, finish))
            return []
        return self._prefilled(output) if self.handoff is Handoff.PULLED else self._first(output, finish)

    def _prefilled(self, output: Any) -> list[Effect]:
        """Prefill's own token is not delivered: decode samples that position again."""
        self.state = State.PULLING
        return [PrefillOver(), StartDecode(output)]

    def _first(self, output: Any, finish: Finish | None) -> list[Effect]:
        if finish is Finish.STOP:
            return self._deliver(output, finish)
        self.state = State.LANDING
        effects: list[Effect] = [Deliver(output, finish=False), PrefillOver()]
        held, self.held = self.held, []
        for late, how in held:
            effects += self.output(Role.DECODE, late, how)
        return effects

    def _go_on(self, output: Any, finish: Finish | None) -> list[Effect]:
        before, self.state = self.state, State.DECODING
        if before is State.PULLING:
            return [EndPrefill(), *self._deliver(output, finish)]
        effects = self._deliver(output, finish)
        if before is State.PREFILLING and finish is None:  # the first: the one replica has computed the prompt
            effects.append(PrefillOver())
        return effects

    def _deliver(self, output: Any, finish: Finish | None) -> list[Effect]:
        effects: list[Effect] = [Deliver(output, finish=finish is not None)]
        return effects if finish is None else effects + self._over(finish)

    def reported(self, role: Role, outcome: str) -> list[Effect]:
        """A replica has ended its part. After `finished` nothing more comes from it, so all that it gave is here."""
        self._check("reported")
        was_heard = self._was_heard(role)
        self._note_end(role)
        if outcome == MOVED:
            return self.lost(Moved(f"the {role} replica gave the session up"), MOVED)
        if outcome != "finished":
            return self.replica_lost(role, outcome)
        return [] if was_heard else self.lost(ReplicaLost(f"the {role} replica's last output did not arrive"))

    def replica_lost(self, role: Role, detail: str) -> list[Effect]:
        """A replica does not finish its part."""
        self._check("replica_lost")
        if self._split and role is Role.PREFILL and self.state is State.DECODING:
            return []  # its part was done
        return self.lost(ReplicaLost(f"the {role} replica was lost: {detail}"))

    # ---- the placement ends

    def lost(self, error: SessionError, outcome: str = "lost") -> list[Effect]:
        """The placement is lost through no fault of the request; another placement may succeed."""
        self._check("lost")
        if self.is_over:
            return []
        self.error = error
        return self._over(outcome, State.LOST)

    def failed(self, error: SessionError) -> list[Effect]:
        """The session ends without an answer. A lost placement has not told the client of an end: this one does."""
        self._check("failed")
        return [Fail(error), *self._end("failed")] if self._is_unended else []

    def cancelled(self) -> list[Effect]:
        """The client is gone, or a stop string was found."""
        self._check("cancelled")
        return self._end("cancelled")

    def interrupted(self) -> list[Effect]:
        """The ingress shuts down: there is no client to tell."""
        self._check("interrupted")
        return self._end("failed")

    def followed(self) -> list[Effect]:
        """Another placement takes over: from here on, that one is cancelled and fails."""
        self._check("followed")
        self.state = State.FOLLOWED
        return []

    def closed(self) -> list[Effect]:
        """Nothing runs for the placement any more, and its reservations are released."""
        self._check("closed")
        self.state = State.CLOSED
        return []

    @property
    def _split(self) -> bool:
        return self.mode is Mode.DISAGGREGATED

    @property
    def _is_unended(self) -> bool:
        """The client can still be told of an end."""
        return self.state is State.LOST or not self.is_over

    def _was_heard(self, role: Role) -> bool:
        """Whether a replica has given all that the session needs of it."""
        if role is self.owner:
            return self.owner_ended
        return not self._split or self.state is not State.PREFILLING

    def _note_end(self, role: Role) -> None:
        if role is self.owner and self.state is not State.CLOSED:
            self.owner_ended = True

    def _end(self, outcome: str) -> list[Effect]:
        if self.state is State.LOST:  # it keeps its outcome, and the parts are being ended
            self.state = State.OVER
        return [] if self.is_over else self._over(outcome)

    def _over(self, outcome: str, state: State = State.OVER) -> list[Effect]:
        self.state, self.outcome = state, str(outcome)
        self.held.clear()
        return [Over(self.outcome)]

    def _check(self, event: str) -> None:
        if self.state not in ALLOWED[event]:
            raise IllegalEvent(f"session {self.session_id}: {event} while {self.state}")
