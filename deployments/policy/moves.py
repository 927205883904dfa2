"""Which sessions move, because a replica's KV blocks are running out or because they cost less elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deployments.fleet.fleet import Fleet
from deployments.fleet.view import LiveView
from deployments.messages import Mode, ReplicaInfo, ReplicaSnapshot, Role
from deployments.policy.admission.breakers import Breakers
from deployments.policy.decider import Decider, OpenSession
from deployments.policy.placement.field import takes
from deployments.policy.placement.rebalance import MOST_ATTEMPTS, REST_S, Looks, candidate
from deployments.policy.placement.relief import REST, Relief, Running, choose_moves, room_of, running
from deployments.step_cost import Coefficients

LOOKED_AT = 4
"""The most answers of a drained replica for which room is looked for at one report."""


class Moves:
    """Relief and rebalancing applied to the fleet. `interval_s`: between two reports of a replica."""

    def __init__(self, decider: Decider, fleet: Fleet, breakers: Breakers, interval_s: float) -> None:
        self._decider, self._settings = decider, decider.settings
        self._fleet, self._breakers = fleet, breakers
        self._relief, self._looks = Relief(interval_s), Looks()

    def barred(self, now_s: float, moving: bool) -> tuple[str, ...]:
        """The replicas that take no session now. `moving`: the session moves, so it may use room kept for such ones."""
        return self._relief.pressed(now_s) if moving else self._relief.barred(now_s)

    def choose(
        self, snapshot: ReplicaSnapshot, takes_s: Coefficients, sessions: Mapping[str, OpenSession], now_s: float
    ) -> tuple[str, ...]:
        """The sessions that a replica gives up now: its blocks are running out, and others have room.

        `takes_s`: what the steps of its pool take. `sessions`: those that this allocator has placed.
        """
        info = snapshot.info
        if not self._settings.moves or not self._settings.relieves or not snapshot.held_tokens or info is None:
            return ()
        steps = self._relief.steps(snapshot, takes_s)
        if not info.decodes or not self._relief.is_pressed(snapshot, steps, now_s):
            return ()
        snapshots = self._fleet.snapshots()
        barred = {*self._relief.pressed(now_s), *self._breakers.shut(now_s)}
        rooms = [
            room_of(view, snapshots[view.info.replica_id], REST * steps)
            for view in self._fleet.view(now_s).ready
            if self._takes_over(view.info)
            and view.info.replica_id not in barred
            and view.info.fingerprint == info.fingerprint
        ]

        def may_hold(running: Running, target: ReplicaInfo) -> bool:
            return self._may_hold(sessions.get(running.session_id), running, target)

        moves = choose_moves(snapshot, rooms, steps, may_hold)
        self._relief.keep(moves.values(), now_s)
        return tuple(moves)

    def rebalance(
        self, snapshot: ReplicaSnapshot, sessions: Mapping[str, OpenSession], view: LiveView
    ) -> tuple[str, ...]:
        """The answer that a replica gives up now, if any, because it costs less elsewhere.

        `sessions`: those that this allocator has placed. Others stay.
        """
        replica_id = snapshot.replica_id
        answers = [
            (each, _left_tokens(sessions[each.session_id], each))
            for each in running(snapshot)
            if each.session_id in sessions and _may_move(sessions[each.session_id], view.now_s)
        ]
        found = candidate(answers)
        if found is None or replica_id not in view.columns.rows:
            return ()
        answer, left_tokens = found
        reserved = snapshot.reservations[snapshot.sessions.index(answer.session_id)]
        without = view.without_answer(replica_id, reserved.held_tokens, reserved.expected_blocks)
        saved_s = self._decider.saved_s(sessions[answer.session_id], answer, left_tokens, without, replica_id)
        return (answer.session_id,) if saved_s > 0 else ()

    def away(self, snapshot: ReplicaSnapshot, sessions: Mapping[str, OpenSession], view: LiveView) -> tuple[str, ...]:
        """The answer that a drained replica gives up now, if any: the first of some that another one has room for.

        `sessions`: those that this allocator has placed. Others end where they are.
        """
        if not self._settings.moves:
            return ()
        mine = [each for each in running(snapshot) if each.movable and each.session_id in sessions]
        for answer in mine[:LOOKED_AT]:
            session = sessions[answer.session_id]
            if self._decider.has_room_elsewhere(
                session, answer, _left_tokens(session, answer), view, snapshot.replica_id
            ):
                return (answer.session_id,)
        return ()

    def is_time_to_rebalance(self, snapshot: ReplicaSnapshot, now_s: float) -> bool:
        """Whether to look now for an answer that costs less elsewhere."""
        settings, info = self._settings, snapshot.info
        may = settings.moves and settings.rebalances and info is not None and info.decodes and any(snapshot.held_tokens)
        return bool(may) and self._looks.is_due(snapshot.replica_id, now_s)

    def _takes_over(self, info: ReplicaInfo) -> bool:
        keeps_roles = self._settings.split_always and info.role is Role.PREFILL
        return info.decodes and not keeps_roles

    def _may_hold(self, session: OpenSession | None, running: Running, target: ReplicaInfo) -> bool:
        if session is None:
            return True  # its own allocator checks this when the session is placed again
        request = session.request
        whole = request.prompt_tokens + request.max_tokens
        remainder = replace(request, prompt_tokens=running.held_tokens, max_tokens=whole - running.held_tokens)
        return takes(remainder, target, self._settings.limits)


def _may_move(session: OpenSession, now_s: float) -> bool:
    """Whether an answer may move for its costs: its KV can be handed over, and it has not moved often, or just now."""
    request = session.request
    rests = request.attempt > 1 and now_s < session.since_s + REST_S
    return Mode.DISAGGREGATED in request.allowed and request.attempt < MOST_ATTEMPTS and not rests


def _left_tokens(session: OpenSession, answer: Running) -> float:
    """The tokens that an answer is expected to write yet."""
    return max(0.0, session.knowledge.output_tokens - (answer.held_tokens - session.request.prompt_tokens))
