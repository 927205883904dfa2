"""One placement of a session as a pure state machine: events in, effects out.

The cluster core owns it and carries out the effects. `ALLOWED` is the table of legal events; an illegal event
raises `IllegalEvent` and changes nothing. Outputs are opaque here: a prefill output carries the first token, and
decode outputs that overtake it on the way are held back until it has been delivered. Where the handoff is pulled,
decode is started with prefill's output and gives every token itself.

A placement that was `Lost` by no fault of the request's can be followed by another, with a machine of its own; what
is said of the old one then falls on a machine that is over, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deployments.errors import HandoffFailed, ReplicaLost, SessionError
from deployments.messages import Handoff, Mode, Role


class IllegalEvent(Exception):
    """The caller's mistake: this event cannot happen in this state."""


class State(StrEnum):
    OPENING = "opening"
    PREFILLING = "prefilling"
    PULLING = "pulling"
    LANDING = "landing"
    DECODING = "decoding"
    OVER = "over"


class Finish(StrEnum):
    """Why an engine ended its part, as far as splitting cares."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"


ALLOWED: dict[str, frozenset[State]] = {
    "placed": frozenset({State.OPENING}),
    "output": frozenset(State) - {State.OPENING},
    "call_ended": frozenset(State) - {State.OPENING},
    "lost": frozenset(State) - {State.OPENING},
    "failed": frozenset(State),
    "cancelled": frozenset(State),
}


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give an output to the frontend. `finish`: whether its finish reason stands."""

    output: Any
    finish: bool


@dataclass(frozen=True, slots=True)
class PrefillOver:
    """The prompt is computed: whoever prefilled has that much less to do."""


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Start the decode replica's part. `output`: prefill's, which says where decode finds the KV cache."""

    output: Any


@dataclass(frozen=True, slots=True)
class EndPrefill:
    """Decode has the KV cache: prefill need not hold its blocks any longer."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The placement came to nothing, by no fault of the request's; another one may do better."""

    error: SessionError


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client that there will be no (more) answer."""

    error: SessionError


@dataclass(frozen=True, slots=True)
class Close:
    """End both replicas' parts that are still open, and give back what was reserved."""

    outcome: str


Effect = Deliver | PrefillOver | StartDecode | EndPrefill | Lost | Fail | Close


@dataclass(slots=True)
class Session:
    """A placement is over once, with one `Close`, whatever happens.

    LANDING: the first token is out, and nobody has heard yet that the KV cache is where decode needs it.
    """

    session_id: str
    handoff: Handoff = Handoff.PUSHED
    mode: Mode | None = None
    state: State = State.OPENING
    held: list[tuple[Any, Finish | None]] = field(default_factory=list)

    def placed(self, mode: Mode) -> list[Effect]:
        """Admission has placed the session."""
        self._check("placed")
        self.mode = mode
        self.state = State.PREFILLING
        return []

    def output(self, role: Role, output: Any, finish: Finish | None) -> list[Effect]:
        """An engine of the session produced something."""
        self._check("output")
        if self.state is State.OVER:
            return []
        if self._split and role is Role.PREFILL and self.state is not State.PREFILLING:
            return []  # it has said all it has to say
        if finish is Finish.ERROR:
            error = HandoffFailed if self._split else SessionError
            return self.lost(error(f"the {role} engine could not go on with the request"))
        if finish is Finish.ABORT:  # nobody here has asked for that
            return self.lost(ReplicaLost(f"the {role} engine gave the request up"))
        if self.state is State.LANDING:
            self.state = State.DECODING
        if self.state is State.DECODING:
            return self._deliver(output, finish)
        if not self._split:  # its first: the one replica has computed the prompt
            self.state = State.DECODING
            return self._deliver(output, finish) + ([PrefillOver()] if finish is None else [])
        if self.state is State.PULLING:
            self.state = State.DECODING
            return [EndPrefill(), *self._deliver(output, finish)]
        if role is Role.DECODE:
            self.held.append((output, finish))
            return []
        return self._prefilled(output) if self.handoff is Handoff.PULLED else self._first(output, finish)

    def _prefilled(self, output: Any) -> list[Effect]:
        """Prefill's own token is not delivered, whatever it is: decode samples that position again."""
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

    def _deliver(self, output: Any, finish: Finish | None) -> list[Effect]:
        effects: list[Effect] = [Deliver(output, finish=finish is not None)]
        return effects if finish is None else effects + self._over(finish)

    def call_ended(self, role: Role, clean: bool, detail: str) -> list[Effect]:
        """A replica's call is over. When it ended cleanly its last outputs are here or on their way."""
        self._check("call_ended")
        if clean or self.state is State.OVER:
            return []
        if self._split and role is Role.PREFILL and self.state is State.DECODING:
            return []  # its part was done
        return self.lost(ReplicaLost(f"the {role} replica was lost: {detail}"))

    def lost(self, error: SessionError, outcome: str = "lost") -> list[Effect]:
        """The placement can come to no end."""
        self._check("lost")
        return [] if self.state is State.OVER else [Lost(error), *self._over(outcome)]

    def failed(self, error: SessionError) -> list[Effect]:
        """Something ended the session without an answer."""
        self._check("failed")
        return [] if self.state is State.OVER else [Fail(error), *self._over("failed")]

    def cancelled(self) -> list[Effect]:
        """The client went away, or a stop string was found."""
        self._check("cancelled")
        return [] if self.state is State.OVER else self._over("cancelled")

    @property
    def _split(self) -> bool:
        return self.mode is Mode.DISAGGREGATED

    def _over(self, outcome: str) -> list[Effect]:
        self.state = State.OVER
        self.held.clear()
        return [Close(str(outcome))]

    def _check(self, event: str) -> None:
        if self.state not in ALLOWED[event]:
            raise IllegalEvent(f"session {self.session_id}: {event} while {self.state}")
