"""A promise: the ledger's entry of one placement, and what it reserves on each of its replicas. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deployments.messages import NOTHING, Placement, Reservation

Key = tuple[str, int]
"""The identity of a promise: session id and epoch."""


class Taken(NamedTuple):
    """What some answers of a replica have, as its row counts it. `free_blocks`: those that would be free."""

    sessions: int
    held_tokens: float
    expected_blocks: float
    free_blocks: float = 0.0


@dataclass(frozen=True, slots=True)
class Promise:
    """The ledger's entry of one placement. `seen_s`: when a replica last listed the session, at first when it was made.

    `prefilling`: the prompt is not computed yet. `finished`: the owner has reported that its part is over, so that it
    holds nothing. `released`: the session is closed.
    """

    placement: Placement
    prompt_tokens: int
    at_s: float
    seen_s: float
    prefilling: bool = True
    finished: bool = False
    released: bool = False

    @property
    def key(self) -> Key:
        """Session id and epoch."""
        return self.placement.session_id, self.placement.epoch

    @property
    def replica_ids(self) -> tuple[str, str]:
        """The owner and the replica that prefills. Decode may still be called when the prefill is over."""
        return self.placement.owner.replica_id, self.placement.prefiller.replica_id

    def reservation(self, replica_id: str) -> Reservation:
        """The amounts that it still reserves on one of its replicas."""
        reserved = self.placement.reservation(replica_id, self.prompt_tokens)
        if self.prefilling:
            return reserved
        holds = replica_id == self.placement.owner.replica_id and not self.finished
        return reserved.prefilled() if holds else NOTHING

    def may_be_let_go_by(self, replica_id: str) -> bool:
        """Whether this replica writes its answer now, and may let it go for another session."""
        return self.placement.yields and not self.prefilling and self.is_answered_on(replica_id)

    def is_answered_on(self, replica_id: str) -> bool:
        """Whether this replica writes its answer, or will as soon as another one has computed the prompt."""
        if replica_id != self.placement.owner.replica_id or self.finished or self.released:
            return False
        return not self.prefilling or replica_id != self.placement.prefiller.replica_id
