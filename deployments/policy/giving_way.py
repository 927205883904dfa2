"""Sessions of classes that yield give way: another session gets what they hold, in the same step. Pure.

A session is placed as if those that yield were not there, where it has no place beside them. Its owner is told with the
session's own task which sessions to let go, before it begins that one. What is let go asks for a place again. One that
was not told of in time, because an ingress died in between, is named in the answer to the replica's next report.
"""

from __future__ import annotations

from dataclasses import replace

from deployments.fleet.fleet import Fleet
from deployments.fleet.promise import Promise
from deployments.messages import Mode, Placement, ReplicaSnapshot, SessionRequest
from deployments.policy.decider import Decider
from deployments.policy.placement.letting_go import Answer, let_go, may_be_let_go, shortage
from deployments.step_cost import Coefficients

LATE_S = 1.0
"""A replica that still lists a session so long after it was to let it go is told so by the answer to its report."""


class GivingWay:
    """Names the sessions that are let go, and enters that into the fleet's books."""

    def __init__(self, decider: Decider, fleet: Fleet) -> None:
        self._decider, self._fleet = decider, fleet
        self._told: dict[str, dict[str, float]] = {}
        """When each session was let go, by replica; until that replica lists it no more."""
        self.count = 0
        """Of all that were let go."""

    def settle(self, request: SessionRequest, placement: Placement, takes: Coefficients, now_s: float) -> Placement:
        """A placement that is about to be made, with what its owner lets go for it, which counts as gone from now on.

        `takes`: what the steps of the owner's pool take. Of a session that yields: whether it may be let go itself.
        """
        owner = placement.owner.replica_id
        self._told.get(owner, {}).pop(request.session_id, None)
        if self._decider.classes.resolve(request.priority).yields:
            can_go_on = Mode.DISAGGREGATED in request.allowed and self._decider.settings.moves
            return replace(placement, yields=True) if can_go_on and may_be_let_go(request) else placement
        answers = {each.placement.session_id: each for each in self._fleet.may_let_go(owner)}
        row = self._fleet.row(owner) if answers else None
        if row is None:
            return placement
        reserved, slack = placement.reservation(owner, request.prompt_tokens), self._decider.settings.slack
        lacking = shortage(row, reserved.blocks, reserved.held_tokens, placement.tpot_s, takes, slack)
        if lacking.is_over:
            return placement
        chosen = [each.session_id for each in let_go(self._answers(owner, answers), lacking)]
        for session_id in chosen:
            self._fleet.let_go(answers[session_id], now_s)
            self._told.setdefault(owner, {})[session_id] = now_s
        self.count += len(chosen)
        return replace(placement, let_go=tuple(chosen))

    def _answers(self, owner: str, promises: dict[str, Promise]) -> list[Answer]:
        """They hold what the replica has reported, or at least their prompts."""
        snapshot = self._fleet.snapshots()[owner]
        held = dict(zip(snapshot.sessions, snapshot.held_tokens, strict=False))
        return [
            Answer(name, each.reservation(owner).blocks, max(held.get(name, 0), each.prompt_tokens))
            for name, each in promises.items()
        ]

    def late(self, snapshot: ReplicaSnapshot, now_s: float) -> tuple[str, ...]:
        """The sessions that a replica was to let go long ago, and still lists."""
        if (told := self._told.get(snapshot.replica_id)) is None:
            return ()
        listed = {name: at_s for name, at_s in told.items() if name in snapshot.sessions}
        self._told[snapshot.replica_id] = listed
        if not listed:
            del self._told[snapshot.replica_id]
        return tuple(name for name, at_s in listed.items() if now_s - at_s > LATE_S)

    def forget(self, replica_id: str) -> None:
        """A replica is gone."""
        self._told.pop(replica_id, None)
