"""The fleet: what every replica last reported, and what has been promised on it.

A snapshot is up to one interval old and a promise is known at once, so neither alone is the truth. The number
that placement relies on is hard: the blocks of a promise (prompt plus the longest answer) count from the
moment it is made until it is released *and* its replica no longer lists the session, or says that it has finished.
What is free by that count is free in the engine, so decoding never has to preempt.

A session that the ledger did not place (another allocator did, or this one before it was restarted) counts in the same
way while its replica lists it: the replica says what was promised to it.

Beside it goes what is expected (prompt plus predicted answer, predicted seconds of prefill), for comparing replicas.
Rows are made anew for the replicas that an event concerns, not for all of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

from deployments.fleet.view import Columns, FleetView, LiveView, ReplicaView
from deployments.messages import (
    NOTHING,
    Peers,
    Phase,
    Placement,
    ReplicaInfo,
    ReplicaSnapshot,
    Reservation,
    Role,
)
from deployments.step_cost import Coefficients

Key = tuple[str, int]
"""A promise's identity: session id and epoch."""

_THEIRS = 0
"""The epoch of a session that the ledger did not place."""

_NOTHING: Mapping[str, Coefficients] = {}

_SEEN_EVERY_S = 1.0
"""A promise's `seen_s` is brought up to date so often: it is compared with many times that."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What one placement reserved. `seen_s`: when a replica last listed the session (or when it was made).

    `prefilling`: the prompt is not computed yet. `finished`: the owner says that its part is over, and holds nothing.
    `released`: the session is closed.
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
        """The replicas that work for the session, its owner first; decode may be called when prefill is over."""
        return self.placement.owner.replica_id, self.placement.prefiller.replica_id

    def reservation(self, replica_id: str) -> Reservation:
        """What it still takes on one of its replicas."""
        reserved = self.placement.reservation(replica_id, self.prompt_tokens)
        if self.prefilling:
            return reserved
        holds = replica_id == self.placement.owner.replica_id and not self.finished
        return reserved.prefilled() if holds else NOTHING


@dataclass(frozen=True, slots=True)
class ReplicaPhase:
    """A replica's phase and its newest snapshot's age, for `/ready`. `fresh`: young enough to place on."""

    phase: Phase
    age_s: float
    fresh: bool


@dataclass(frozen=True, slots=True)
class _Arrival:
    snapshot: ReplicaSnapshot
    at_s: float
    listed: frozenset[str]  # its sessions, to be asked for one


@dataclass(slots=True)
class _Share:
    """What concerns one replica: promises, and `theirs`, what it lists and nobody here promised, by session.

    The sums are over what is not released. `prompts`: seconds of those it has yet to prefill, oldest first. `begun_s`:
    when the first began. `confirmed_s`: when the replica's sessions were last compared with its promises.
    """

    replica_id: str
    promises: dict[Key, Promise] = field(default_factory=dict)
    released: dict[Key, Promise] = field(default_factory=dict)
    theirs: dict[str, Reservation] = field(default_factory=dict)
    prompts: dict[Key, float] = field(default_factory=dict)
    begun_s: float = 0.0
    confirmed_s: float = -math.inf
    sessions: int = 0
    blocks: int = 0
    expected_blocks: int = 0
    held_tokens: int = 0
    backlog_tokens: int = 0
    work_s: float = 0.0
    pending: int = 0

    def put(self, promise: Promise, now_s: float) -> None:
        """Enter a promise, or bring it up to date."""
        key = promise.key
        before = self.promises.get(key)
        head = next(iter(self.prompts), None)
        if before is not None and not before.released:
            self._add(before.reservation(self.replica_id), -1)
        self.promises[key] = promise
        reserved = NOTHING if promise.released else promise.reservation(self.replica_id)
        self._add(reserved, 1)
        if promise.released:
            self.released[key] = promise
        if reserved.prefill_tokens:
            self.prompts[key] = reserved.prefill_s
        else:
            self.prompts.pop(key, None)
        self._notice(head, now_s)

    def remove(self, promise: Promise, now_s: float) -> None:
        """Take a promise out."""
        head = next(iter(self.prompts), None)
        before = self.promises.pop(promise.key)
        if not before.released:
            self._add(before.reservation(self.replica_id), -1)
        self.released.pop(promise.key, None)
        self.prompts.pop(promise.key, None)
        self._notice(head, now_s)

    def put_theirs(self, theirs: dict[str, Reservation], listed: Sequence[str], now_s: float) -> None:
        """What others promised, by the newest snapshot. `listed`: all its sessions, in the order of their prefills."""
        if not theirs and not self.theirs:
            return
        head = next(iter(self.prompts), None)
        for reserved in self.theirs.values():
            self._add(reserved, -1)
        for reserved in theirs.values():
            self._add(reserved, 1)
        self.theirs = theirs
        ours = {key[0]: (key, seconds) for key, seconds in self.prompts.items() if key[1] != _THEIRS}
        self.prompts = {}
        for session_id in listed:
            if session_id in ours:
                key, seconds = ours.pop(session_id)
                self.prompts[key] = seconds
            elif session_id in theirs and theirs[session_id].prefill_tokens:
                self.prompts[session_id, _THEIRS] = theirs[session_id].prefill_s
        self.prompts.update(ours.values())
        self._notice(head, now_s)

    def _notice(self, head: Key | None, now_s: float) -> None:
        if not self.prompts:
            self.work_s = 0.0  # sums of seconds drift
        elif next(iter(self.prompts)) != head:
            self.begun_s = now_s

    def _add(self, reserved: Reservation, sign: int) -> None:
        self.sessions += sign * (reserved is not NOTHING)
        self.blocks += sign * reserved.blocks
        self.expected_blocks += sign * reserved.expected_blocks
        self.held_tokens += sign * reserved.held_tokens
        self.backlog_tokens += sign * reserved.prefill_tokens
        self.work_s += sign * reserved.prefill_s
        self.pending += sign * reserved.pending


class Fleet:
    """The newest snapshot of each replica and the ledger of promises. Times are seconds of the caller's.

    `pools`: the pools that the configuration names, with their roles. `stale_s`: a replica silent for longer
    is not placed on. `slack_s`: a promise outlives its session's timeout by this. `unconfirmed_s`: a promise
    whose replicas have not listed the session for so long is void (its ingress died before the session began, or
    before it closed). `forget_s`: a replica silent for longer is forgotten. `overcommit`: blocks of a decode replica
    that may be promised, in parts of what it has.
    """

    def __init__(
        self,
        pools: Mapping[str, Role],
        *,
        stale_s: float,
        slack_s: float = 30.0,
        unconfirmed_s: float = 30.0,
        forget_s: float = 60.0,
        overcommit: float = 1.0,
    ) -> None:
        self._pools = dict(pools)
        self._stale_s = stale_s
        self._slack_s = slack_s
        self._unconfirmed_s = unconfirmed_s
        self._forget_s = forget_s
        self._overcommit = overcommit
        names: dict[str, int] = {}
        self._columns = {role: Columns(names) for role in Role}
        self._stale_rows: dict[str, None] = {}  # in order, so that a run can be repeated
        self._shares: dict[str, _Share] = {}
        self._of_session: dict[str, dict[Key, Promise]] = {}
        self._known: tuple[ReplicaInfo, ...] | None = None
        self._arrivals: dict[str, _Arrival] = {}
        self._shapes: dict[str, ReplicaInfo] = {}
        self._promises: dict[Key, Promise] = {}
        self._epochs: dict[str, tuple[int, float]] = {}
        self._peers: dict[tuple[Role, str], Peers] = {}

    def update(self, snapshot: ReplicaSnapshot, now_s: float) -> None:
        """Take a replica's snapshot; one that is older than the newest is ignored."""
        known = self._arrivals.get(snapshot.replica_id)
        if known is not None and snapshot.version <= known.snapshot.version:
            return
        if known is None or known.snapshot.info != snapshot.info:
            self._peers.clear()
            self._known = None
        self._arrivals[snapshot.replica_id] = _Arrival(snapshot, now_s, frozenset(snapshot.sessions))
        if snapshot.info is not None:
            self._shapes[snapshot.info.pool] = snapshot.info
        self._stale_rows[snapshot.replica_id] = None
        self._put_theirs(snapshot.replica_id, snapshot, now_s)
        self._confirm(snapshot, now_s)
        self._take_finished(snapshot, known.snapshot.finished_version if known else 0, now_s)
        self._drop_released(snapshot.replica_id, now_s)

    def forget(self, replica_id: str) -> None:
        """A replica is gone. Its promises stay until their sessions are closed."""
        self._arrivals.pop(replica_id, None)
        self._peers.clear()
        self._known = None
        self._stale_rows[replica_id] = None
        self._put_theirs(replica_id, None, 0.0)
        self._drop_released(replica_id, 0.0)

    def next_epoch(self, session_id: str, now_s: float, least: int = 1) -> int:
        """The epoch of a session's next placement: `least`, or one more than the last that is known here.

        Those before it may have been made by another ledger.
        """
        epoch = max(least, self._epochs.get(session_id, (0, now_s))[0] + 1)
        self._epochs[session_id] = epoch, now_s
        return epoch

    def promise(self, placement: Placement, prompt_tokens: int, now_s: float) -> None:
        """Reserve what a placement needs. Raises ValueError when that session and epoch have a promise."""
        promise = Promise(placement, prompt_tokens, at_s=now_s, seen_s=now_s)
        if promise.key in self._promises:
            raise ValueError(f"session {promise.key[0]} epoch {promise.key[1]} has a promise already")
        self._put(promise, now_s)

    def prefill_done(self, session_id: str, epoch: int, now_s: float) -> bool:
        """The prompt is computed: it is no backlog any more, and the next one begins. True when that was news."""
        promise = self._promises.get((session_id, epoch))
        if promise is None or not promise.prefilling:
            return False
        self._put(replace(promise, prefilling=False), now_s)
        return True

    def release(self, session_id: str, epoch: int, now_s: float, ended: bool = False) -> bool:
        """The session is over; idempotent. True when that was news.

        Its blocks still count on a replica whose newest snapshot lists the session: the engine has not freed
        them. `ended`: the owner has said since then that its part is over, and holds nothing.
        """
        promise = self._promises.get((session_id, epoch))
        if promise is None or promise.released:
            return False
        released = replace(promise, released=True, prefilling=False, finished=promise.finished or ended)
        self._put(released, now_s)
        if not self._is_listed(released):
            self._remove(released, now_s)
        return True

    def expire(self, now_s: float) -> tuple[Promise, ...]:
        """Drop promises that outlived their session or were never taken up, and replicas long silent."""
        expired = tuple(promise for promise in self._promises.values() if self._is_void(promise, now_s))
        for promise in expired:
            self._remove(promise, now_s)
        for replica_id, arrival in list(self._arrivals.items()):
            if now_s - arrival.at_s > self._forget_s:
                self.forget(replica_id)
        open_sessions = {session_id for session_id, _ in self._promises}
        for session_id, (_, at_s) in list(self._epochs.items()):
            if session_id not in open_sessions and now_s - at_s > self._forget_s:
                del self._epochs[session_id]
        return expired

    def promises(self) -> tuple[Promise, ...]:
        """The promises of open sessions, oldest first."""
        return tuple(promise for promise in self._promises.values() if not promise.released)

    def promises_of(self, session_id: str) -> tuple[Promise, ...]:
        """The open promises of one session, by epoch: ordinarily one, or none."""
        return tuple(each for each in self._of_session.get(session_id, {}).values() if not each.released)

    def __len__(self) -> int:
        """The replicas that have reported and are not forgotten."""
        return len(self._arrivals)

    def snapshots(self) -> Mapping[str, ReplicaSnapshot]:
        """The newest snapshot of every replica, by replica id."""
        return {replica_id: arrival.snapshot for replica_id, arrival in self._arrivals.items()}

    def peers(self, info: ReplicaInfo) -> Peers:
        """The replicas with the same fingerprint that it may exchange KV with.

        For prefill all decode replicas, which it writes to. For decode all replicas, itself among them: prefill writes
        to it, and any decode replica may move a session to any other.
        """
        key = info.role, info.fingerprint
        if key not in self._peers:
            infos = (arrival.snapshot.info for arrival in self._arrivals.values())
            endpoints = tuple(
                sorted(
                    peer.endpoints
                    for peer in infos
                    if peer
                    and peer.endpoints
                    and Role.DECODE in (peer.role, info.role)
                    and peer.fingerprint == info.fingerprint
                )
            )
            self._peers[key] = Peers(zlib.crc32(repr(endpoints).encode()), endpoints)
        return self._peers[key]

    def is_out_of_step(self, info: ReplicaInfo, phase: Phase, now_s: float) -> bool:
        """Whether a replica that is starting is ahead of all that it could exchange KV with, while an old pair serves.

        If it had started, Serve would stop one of that pair before the next is whole. Loaded, it waits until another is
        loaded; ready, until another is ready.
        """
        loaded, serving = set(), set()
        for arrival in self._arrivals.values():
            other = arrival.snapshot.info
            if other is None or arrival.snapshot.phase is Phase.DRAINING or not self._is_fresh(arrival, now_s):
                continue
            loaded.add((other.role, other.fingerprint))
            if arrival.snapshot.phase is Phase.READY:
                serving.add((other.role, other.fingerprint))
        partner = Role.DECODE if info.role is Role.PREFILL else Role.PREFILL
        if (partner, info.fingerprint) in (serving if phase is Phase.READY else loaded):
            return False
        return any(role is info.role and (partner, engine) in serving for role, engine in serving)

    def view(self, now_s: float) -> FleetView:
        """The fleet at this moment by rows, for people."""
        ready = (
            self._row(arrival)
            for replica_id, arrival in sorted(self._arrivals.items())
            if self._is_placeable(arrival.snapshot) and self._is_fresh(arrival, now_s)
        )
        return FleetView(tuple(ready), self._shapes_known(), self._silent(), now_s)

    def live(
        self, now_s: float, coefficients: Mapping[str, Coefficients] | None = None, shut: Iterable[str] = ()
    ) -> LiveView:
        """The fleet at this moment by columns, for policy; good until the next change.

        `coefficients`: what the steps of each pool take; a new object when they have changed. `shut`: replicas that do
        not count as ready.
        """
        for replica_id in self._stale_rows:
            self._refresh(replica_id)
        self._stale_rows.clear()
        for columns in self._columns.values():
            columns.learn(coefficients or _NOTHING)
        by_role = {role: columns.at(now_s, self._stale_s) for role, columns in self._columns.items()}
        for replica_id in shut:
            for columns in by_role.values():
                if (row := columns.rows.get(replica_id)) is not None:
                    columns.ready[row] = False  # its own array: `at` makes one
        return LiveView(by_role, self._shapes_known(), self._silent(), now_s)

    def silent(self, replica_ids: Iterable[str], now_s: float) -> tuple[str, ...]:
        """Those of these replicas that are stale or unknown."""
        arrivals = ((replica_id, self._arrivals.get(replica_id)) for replica_id in replica_ids)
        return tuple(each for each, arrival in arrivals if arrival is None or not self._is_fresh(arrival, now_s))

    def phases(self, now_s: float) -> dict[str, dict[str, ReplicaPhase]]:
        """Every expected or seen pool, with its replicas' phases by replica id."""
        pools: dict[str, dict[str, ReplicaPhase]] = {pool: {} for pool in self._pools}
        for replica_id, arrival in sorted(self._arrivals.items()):
            snapshot = arrival.snapshot
            pool = snapshot.info.pool if snapshot.info is not None else snapshot.pool
            phase = ReplicaPhase(snapshot.phase, now_s - arrival.at_s, self._is_fresh(arrival, now_s))
            pools.setdefault(pool, {})[replica_id] = phase
        return pools

    def _is_fresh(self, arrival: _Arrival, now_s: float) -> bool:
        return now_s - arrival.at_s <= self._stale_s

    def _is_void(self, promise: Promise, now_s: float) -> bool:
        outlived = now_s - promise.at_s > promise.placement.session_timeout_s + self._slack_s
        return outlived or now_s - promise.seen_s > self._unconfirmed_s

    def _shapes_known(self) -> tuple[ReplicaInfo, ...]:
        if self._known is None:
            infos = (arrival.snapshot.info for arrival in self._arrivals.values())
            shapes = (*self._shapes.values(), *(info for info in infos if info is not None))
            self._known = tuple({_shape(info): info for info in shapes}.values())
        return self._known

    def _silent(self) -> tuple[Role, ...]:
        return tuple(sorted({role for pool, role in self._pools.items() if pool not in self._shapes}))

    def _is_placeable(self, snapshot: ReplicaSnapshot) -> bool:
        return snapshot.info is not None and snapshot.phase is Phase.READY

    def _refresh(self, replica_id: str) -> None:
        arrival = self._arrivals.get(replica_id)
        if arrival is None or arrival.snapshot.info is None:
            for columns in self._columns.values():
                columns.drop(replica_id)
            return
        snapshot, role = arrival.snapshot, arrival.snapshot.info.role
        ready = self._is_placeable(snapshot)
        self._columns[role].put(self._row(arrival), ready=ready, seen_s=arrival.at_s)

    def _row(self, arrival: _Arrival) -> ReplicaView:
        replica_id = arrival.snapshot.replica_id
        return _view(arrival, self._shares.get(replica_id) or _Share(replica_id), self._overcommit)

    # ---- the ledger: every promise by its key, and by the replicas and the session that it concerns

    def _put(self, promise: Promise, now_s: float) -> None:
        self._promises[promise.key] = promise
        self._of_session.setdefault(promise.placement.session_id, {})[promise.key] = promise
        for replica_id in set(promise.replica_ids):
            share = self._shares.get(replica_id)
            if share is None:
                share = self._shares[replica_id] = _Share(replica_id)
            share.put(promise, now_s)
            self._stale_rows[replica_id] = None

    def _remove(self, promise: Promise, now_s: float) -> None:
        del self._promises[promise.key]
        of_session = self._of_session[promise.placement.session_id]
        del of_session[promise.key]
        if not of_session:
            del self._of_session[promise.placement.session_id]
        for replica_id in set(promise.replica_ids):
            share = self._shares[replica_id]
            share.remove(promise, now_s)
            if not share.promises and not share.theirs:
                del self._shares[replica_id]
            self._stale_rows[replica_id] = None

    def _put_theirs(self, replica_id: str, snapshot: ReplicaSnapshot | None, now_s: float) -> None:
        share = self._shares.get(replica_id) or _Share(replica_id)
        listed = snapshot.sessions if snapshot is not None else ()
        reservations = snapshot.reservations if snapshot is not None else ()
        ours = {session_id for session_id, _ in share.promises}
        theirs = {
            session_id: reserved
            for session_id, reserved in zip(listed, chain(reservations, repeat(NOTHING)), strict=False)
            if session_id not in ours
        }
        share.put_theirs(theirs, listed, now_s)
        if share.promises or share.theirs:
            self._shares[replica_id] = share
        else:
            self._shares.pop(replica_id, None)

    def _confirm(self, snapshot: ReplicaSnapshot, now_s: float) -> None:
        share = self._shares.get(snapshot.replica_id)
        if share is None or now_s - share.confirmed_s < _SEEN_EVERY_S:
            return
        share.confirmed_s, listed = now_s, self._arrivals[snapshot.replica_id].listed
        for promise in [each for key, each in share.promises.items() if key[0] in listed]:
            self._put(replace(promise, seen_s=now_s), now_s)

    def _take_finished(self, snapshot: ReplicaSnapshot, known_version: int, now_s: float) -> None:
        """What ended on a replica since its last snapshot holds nothing there, whoever is yet to close it."""
        news = min(len(snapshot.finished), max(0, snapshot.finished_version - known_version))
        for part in snapshot.finished[len(snapshot.finished) - news :]:
            promise = self._promises.get((part.session_id, part.epoch))
            if promise is not None:
                is_owner = promise.placement.owner.replica_id == snapshot.replica_id
                self._put(replace(promise, finished=promise.finished or is_owner, prefilling=False), now_s)

    def _drop_released(self, replica_id: str, now_s: float) -> None:
        share = self._shares.get(replica_id)
        for promise in list(share.released.values()) if share is not None else ():
            if not self._is_listed(promise):
                self._remove(promise, now_s)

    def _is_listed(self, promise: Promise) -> bool:
        arrivals = (self._arrivals[replica_id] for replica_id in promise.replica_ids if replica_id in self._arrivals)
        return any(promise.placement.session_id in arrival.listed for arrival in arrivals)


def _shape(info: ReplicaInfo) -> tuple[object, ...]:
    """What decides which requests fit: replicas of a pool are alike, unless it is being updated."""
    return info.pool, info.total_blocks, info.block_size, info.max_model_len


def _view(arrival: _Arrival, share: _Share, overcommit: float) -> ReplicaView:
    """A replica's load: what is promised or what it reports, whichever is more."""
    snapshot, info = arrival.snapshot, arrival.snapshot.info
    assert info is not None, "a row is of a replica that has told what it is"
    promised, sessions = share.blocks, share.sessions
    for promise in share.released.values():  # closed, but the engine has not freed it
        if not promise.finished and promise.placement.session_id in arrival.listed:
            promised += promise.reservation(info.replica_id).blocks
            sessions += 1
    taken = max(promised, snapshot.used_blocks)
    capacity = int(info.total_blocks * overcommit) if info.role is Role.DECODE else info.total_blocks
    head_s = next(iter(share.prompts.values()), None)
    return ReplicaView(
        info=info,
        free_blocks=max(0, capacity - taken),
        sessions=max(sessions, snapshot.running + snapshot.waiting),
        backlog_tokens=share.backlog_tokens,
        busy_until_s=0.0 if head_s is None else share.begun_s + share.work_s,
        behind_s=0.0 if head_s is None else max(0.0, share.work_s - head_s),
        expected_blocks=max(share.expected_blocks, snapshot.used_blocks),
        held_tokens=float(max(share.held_tokens, snapshot.running_tokens)),
        pending=share.pending,
    )
