"""Which sessions a decode replica gives up before its KV blocks run out, so that its engine never preempts. Pure.

This happens only with `placement.overcommit` over 1: then more may be reserved than there is, and answers may be longer
than predicted. A replica is pressed when its free blocks do not hold what its running sessions need within `REPORTS`
reporting intervals, at one token per session and step. It then gives up the fewest sessions that leave enough blocks
for `REST` times as long, and only those for which another replica has room for as long. So sessions do not move to and
fro.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deployments.fleet.columns import ReplicaView
from deployments.messages import ReplicaInfo, ReplicaSnapshot
from deployments.step_cost import Coefficients
from transfer.memory.blocks import blocks_for

REPORTS = 10
"""The reporting intervals for which free blocks must last.

A replica is told within one interval and gives up the sessions at once, but it has yet to hand over their KV.
"""

REST = 2.0
"""How many times as long the free blocks must last after the moves."""

LEAST_STEPS = 8
"""The least number of steps for which free blocks must last, however long a step is predicted to take."""


@dataclass(frozen=True, slots=True)
class Running:
    """A session that has begun on a replica.

    `held_tokens`: prompt and answer so far. `blocks`: the most it may hold.
    """

    session_id: str
    held_tokens: int
    blocks: int
    movable: bool

    def growth(self, steps: float, block_size: int) -> int:
        """The new blocks that it needs in so many steps."""
        held = blocks_for(self.held_tokens, block_size)
        return max(0, min(blocks_for(math.ceil(self.held_tokens + steps), block_size), self.blocks) - held)


@dataclass(slots=True)
class Room:
    """What a replica can take over.

    `blocks`: free for long enough. `reservable`: blocks that the ledger can still reserve. `seats`: further sessions.
    """

    info: ReplicaInfo
    blocks: int
    reservable: int
    seats: int

    def holds(self, session: Running, steps: float) -> bool:
        """Whether it has room for this session, for so many steps."""
        enough = session.blocks <= self.reservable and self._needs(session, steps) <= self.blocks
        return enough and self.seats > 0

    def take(self, session: Running, steps: float) -> None:
        """Use the room for a session."""
        self.blocks -= self._needs(session, steps)
        self.reservable -= session.blocks
        self.seats -= 1

    def _needs(self, session: Running, steps: float) -> int:
        held = blocks_for(session.held_tokens, self.info.block_size)
        return held + session.growth(steps, self.info.block_size)


MayHold = Callable[[Running, ReplicaInfo], bool]
"""Whether a replica takes such a session, by the limits of its pool and its size."""


def running(snapshot: ReplicaSnapshot) -> list[Running]:
    """The sessions that have begun on a replica."""
    told = zip(snapshot.sessions, snapshot.held_tokens, snapshot.reservations, strict=True)
    return [
        Running(session_id, held, reserved.blocks, session_id in snapshot.movable)
        for session_id, held, reserved in told
        if held
    ]


def missing_blocks(sessions: Iterable[Running], free_blocks: int, steps: float, block_size: int) -> int:
    """The blocks that these sessions need in so many steps, beyond those that are free."""
    return sum(session.growth(steps, block_size) for session in sessions) - free_blocks


def room_of(view: ReplicaView, snapshot: ReplicaSnapshot, steps: float) -> Room:
    """What a replica can take over beside its own sessions, also those that have not begun yet."""
    info = view.info
    told = zip(snapshot.held_tokens, snapshot.reservations, strict=False)
    coming = sum(blocks_for(reserved.held_tokens, info.block_size) for held, reserved in told if not held)
    own = missing_blocks(running(snapshot), info.total_blocks - snapshot.used_blocks, steps, info.block_size)
    return Room(info, -own - coming, view.free_blocks, info.max_sessions - view.sessions)


def choose_moves(snapshot: ReplicaSnapshot, rooms: Sequence[Room], steps: float, may_hold: MayHold) -> dict[str, str]:
    """The sessions that a pressed replica gives up, each with a replica that has room for it. `rooms` are used up.

    It takes the smallest session that is enough, or else the largest, so that the fewest clients see a gap. Sessions
    that are about to end stay.
    """
    assert snapshot.info is not None
    size, free = snapshot.info.block_size, snapshot.info.total_blocks - snapshot.used_blocks
    staying, chosen = running(snapshot), dict[str, str]()
    while (missing := missing_blocks(staying, free, REST * steps, size)) > 0:
        able = [
            (session, room)
            for session in staying
            if session.movable and blocks_for(session.held_tokens, size) < session.blocks
            if (room := _room_for(session, rooms, steps, may_hold)) is not None
        ]
        if not able:
            break
        relief = {each: blocks_for(each.held_tokens, size) + each.growth(REST * steps, size) for each, _ in able}
        enough = [each for each in able if relief[each[0]] >= missing]
        session, room = min(enough or able, key=lambda each: relief[each[0]] * (1 if enough else -1))
        room.take(session, REST * steps)
        free += blocks_for(session.held_tokens, size)
        staying.remove(session)
        chosen[session.session_id] = room.info.replica_id
    return chosen


def _room_for(session: Running, rooms: Sequence[Room], steps: float, may_hold: MayHold) -> Room | None:
    """The replica with the most room, of those that can take the session."""
    able = [room for room in rooms if room.holds(session, REST * steps) and may_hold(session, room.info)]
    return max(able, key=lambda room: room.blocks, default=None)


@dataclass(slots=True)
class Relief:
    """Which replicas are pressed, and when they were last told which sessions to give up.

    `interval_s`: between two reports. A pressed replica is told again only when the last moves show in its reports.
    Until then it takes no new session, which would get the blocks that are about to be freed. The replicas that have
    room for the moved sessions take no other sessions meanwhile.
    """

    interval_s: float
    _until_s: dict[str, float] = field(default_factory=dict)
    _kept_until_s: dict[str, float] = field(default_factory=dict)

    def steps(self, snapshot: ReplicaSnapshot, takes: Coefficients) -> float:
        """The steps for which free blocks must last.

        `takes`: what the steps of its pool take; all 0 where not known.
        """
        step_s = takes.base_s + len(snapshot.sessions) * takes.sequence_s + snapshot.running_tokens * takes.context_s
        return max(float(LEAST_STEPS), REPORTS * self.interval_s / step_s if step_s > 0 else 0.0)

    def is_pressed(self, snapshot: ReplicaSnapshot, steps: float, now_s: float) -> bool:
        """Whether a replica must give up sessions, and has not been told so a moment ago."""
        info = snapshot.info
        if info is None or not snapshot.held_tokens or snapshot.replica_id in self.pressed(now_s):
            return False
        free = info.total_blocks - snapshot.used_blocks
        if missing_blocks(running(snapshot), free, steps, info.block_size) <= 0:
            return False
        self._until_s[snapshot.replica_id] = now_s + self._pause_s
        return True

    def keep(self, replica_ids: Iterable[str], now_s: float) -> None:
        """These replicas are about to take over sessions."""
        self._kept_until_s |= dict.fromkeys(replica_ids, now_s + self._pause_s)

    def pressed(self, now_s: float) -> tuple[str, ...]:
        """The replicas that take no session, not even one that moves."""
        self._until_s = _still(self._until_s, now_s)
        return tuple(self._until_s)

    def barred(self, now_s: float) -> tuple[str, ...]:
        """The replicas that take no new session."""
        self._kept_until_s = _still(self._kept_until_s, now_s)
        return (*self.pressed(now_s), *self._kept_until_s)

    @property
    def _pause_s(self) -> float:
        return REPORTS / 2 * self.interval_s


def _still(until_s: dict[str, float], now_s: float) -> dict[str, float]:
    return {replica_id: until for replica_id, until in until_s.items() if now_s < until}
