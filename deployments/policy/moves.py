"""Which sessions move because a replica's KV blocks are running out, and which replicas take none meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deployments.fleet.fleet import Fleet
from deployments.messages import ReplicaInfo, ReplicaSnapshot, Role, SessionRequest
from deployments.policy.admission.breakers import Breakers
from deployments.policy.placement.field import PlacementSettings, takes
from deployments.policy.placement.relief import REST, Relief, Running, choose_moves, room_of
from deployments.step_cost import Coefficients

RequestOf = Callable[[str], SessionRequest | None]
"""The request of a session, by its id; None when another allocator has placed it."""


class Moves:
    """Relief applied to the fleet. `interval_s`: between two reports of a replica."""

    def __init__(self, settings: PlacementSettings, fleet: Fleet, breakers: Breakers, interval_s: float) -> None:
        self._settings, self._fleet, self._breakers = settings, fleet, breakers
        self._relief = Relief(interval_s)

    def barred(self, now_s: float, moving: bool) -> tuple[str, ...]:
        """The replicas that take no session now. `moving`: the session moves, so it may use room kept for such ones."""
        return self._relief.pressed(now_s) if moving else self._relief.barred(now_s)

    def choose(
        self, snapshot: ReplicaSnapshot, takes_s: Coefficients, request_of: RequestOf, now_s: float
    ) -> tuple[str, ...]:
        """The sessions that a replica gives up now: its blocks are running out, and others have room.

        `takes_s`: what the steps of its pool take.
        """
        info = snapshot.info
        if not self._settings.moves or not snapshot.held_tokens or info is None:
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
            return self._may_hold(request_of(running.session_id), running, target)

        moves = choose_moves(snapshot, rooms, steps, may_hold)
        self._relief.keep(moves.values(), now_s)
        return tuple(moves)

    def _takes_over(self, info: ReplicaInfo) -> bool:
        keeps_roles = self._settings.split_always and info.role is Role.PREFILL
        return info.decodes and not keeps_roles

    def _may_hold(self, request: SessionRequest | None, running: Running, target: ReplicaInfo) -> bool:
        if request is None:
            return True  # its own allocator checks this when the session is placed again
        whole = request.prompt_tokens + request.max_tokens
        remainder = replace(request, prompt_tokens=running.held_tokens, max_tokens=whole - running.held_tokens)
        return takes(remainder, target, self._settings.limits)
