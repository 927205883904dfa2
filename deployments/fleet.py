"""The fleet view: what every replica last reported, and what has been promised on it.

A snapshot is up to one interval old and a promise is known at once, so neither alone is the truth. The number
that placement relies on is hard: the blocks of a promise (prompt plus the longest answer) count from the
moment it is made until it is released *and* its replica no longer lists the session. What is free by that
count is free in the engine, so decoding never has to preempt.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.messages import Peers, Phase, Placement, ReplicaInfo, ReplicaSnapshot, Role

Key = tuple[str, int]
"""A promise's identity: session id and epoch."""


def blocks_for(tokens: int, block_size: int) -> int:
    """KV blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica that can be placed on now. `backlog_tokens`: prompt tokens it has yet to prefill."""

    info: ReplicaInfo
    free_blocks: int
    sessions: int
    backlog_tokens: int


@dataclass(frozen=True, slots=True)
class FleetView:
    """What policy reads. `ready`: fresh and READY, by replica id.

    `known`: a shape for every pool ever seen, up or down. `silent`: roles of pools that never reported a
    shape, so that nobody can say yet what fits them.
    """

    ready: tuple[ReplicaView, ...] = ()
    known: tuple[ReplicaInfo, ...] = ()
    silent: tuple[Role, ...] = ()

    def of(self, role: Role) -> tuple[ReplicaView, ...]:
        """The ready replicas of a role."""
        return tuple(view for view in self.ready if view.info.role is role)

    def without_room_on(self, replica_ids: Container[str]) -> FleetView:
        """This view, with no free block on the replicas named: they are spoken for."""
        ready = (replace(view, free_blocks=0) if view.info.replica_id in replica_ids else view for view in self.ready)
        return replace(self, ready=tuple(ready))


@dataclass(frozen=True, slots=True)
class Promise:
    """What one placement reserved. `seen_s`: when a replica last listed the session (or when it was made)."""

    placement: Placement
    prompt_tokens: int
    at_s: float
    seen_s: float
    prefilling: bool = True
    released: bool = False

    @property
    def key(self) -> Key:
        """Session id and epoch."""
        return self.placement.session_id, self.placement.epoch

    @property
    def prefiller(self) -> ReplicaInfo:
        """The replica that computes the prompt."""
        return self.placement.prefill or self.placement.owner

    @property
    def replica_ids(self) -> tuple[str, str]:
        """The replicas that work for the session, its owner first; decode may be called when prefill is over."""
        return self.placement.owner.replica_id, self.prefiller.replica_id

    def blocks_on(self, replica_id: str) -> int:
        """Blocks taken on a replica: all on its owner; on a helper the prompt's, while prefilling."""
        if replica_id == self.placement.owner.replica_id:
            return self.placement.reserved_blocks
        prefill = self.placement.prefill
        if prefill is None or prefill.replica_id != replica_id or not self.prefilling:
            return 0
        return blocks_for(self.prompt_tokens + 1, prefill.block_size)


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


class Fleet:
    """The newest snapshot of each replica and the ledger of promises. Times are seconds of the caller's.

    `pools`: the pools that the configuration names, with their roles. `stale_s`: a replica silent for longer
    is not placed on. `slack_s`: a promise outlives its session's timeout by this. `unconfirmed_s`: a promise
    whose replicas have not listed the session for so long is void (its ingress died before the session began, or
    before it closed). `forget_s`: a replica silent for longer is forgotten.
    """

    def __init__(
        self,
        pools: Mapping[str, Role],
        *,
        stale_s: float,
        slack_s: float = 30.0,
        unconfirmed_s: float = 30.0,
        forget_s: float = 60.0,
    ) -> None:
        self._pools = dict(pools)
        self._stale_s = stale_s
        self._slack_s = slack_s
        self._unconfirmed_s = unconfirmed_s
        self._forget_s = forget_s
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
        self._arrivals[snapshot.replica_id] = _Arrival(snapshot, now_s)
        if snapshot.info is not None:
            self._shapes[snapshot.info.pool] = snapshot.info
        self._confirm(snapshot, now_s)
        self._drop_released()

    def forget(self, replica_id: str) -> None:
        """A replica is gone. Its promises stay until their sessions are closed."""
        self._arrivals.pop(replica_id, None)
        self._peers.clear()
        self._drop_released()

    def next_epoch(self, session_id: str, now_s: float) -> int:
        """The epoch of a session's next placement: 1, and one more for each attempt after it."""
        epoch = self._epochs.get(session_id, (0, now_s))[0] + 1
        self._epochs[session_id] = epoch, now_s
        return epoch

    def promise(self, placement: Placement, prompt_tokens: int, now_s: float) -> None:
        """Reserve what a placement needs. Raises ValueError when that session and epoch have a promise."""
        promise = Promise(placement, prompt_tokens, at_s=now_s, seen_s=now_s)
        if promise.key in self._promises:
            raise ValueError(f"session {promise.key[0]} epoch {promise.key[1]} has a promise already")
        self._promises[promise.key] = promise

    def prefill_done(self, session_id: str, epoch: int) -> bool:
        """The prompt is computed: it is no backlog any more. True when that was news."""
        promise = self._promises.get((session_id, epoch))
        if promise is None or not promise.prefilling:
            return False
        self._promises[promise.key] = replace(promise, prefilling=False)
        return True

    def release(self, session_id: str, epoch: int) -> bool:
        """The session is over; idempotent. True when that was news.

        Its blocks still count on a replica whose newest snapshot lists the session: the engine has not freed
        them.
        """
        promise = self._promises.get((session_id, epoch))
        if promise is None or promise.released:
            return False
        self._promises[promise.key] = replace(promise, released=True, prefilling=False)
        self._drop_released()
        return True

    def expire(self, now_s: float) -> tuple[Promise, ...]:
        """Drop promises that outlived their session or were never taken up, and replicas long silent."""
        expired = tuple(promise for promise in self._promises.values() if self._is_void(promise, now_s))
        for promise in expired:
            del self._promises[promise.key]
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
        return tuple(promise for promise in self.promises() if promise.placement.session_id == session_id)

    def snapshots(self) -> Mapping[str, ReplicaSnapshot]:
        """The newest snapshot of every replica, by replica id."""
        return {replica_id: arrival.snapshot for replica_id, arrival in self._arrivals.items()}

    def peers(self, info: ReplicaInfo) -> Peers:
        """The replicas of the other role with the same fingerprint."""
        key = info.role, info.fingerprint
        if key not in self._peers:
            infos = (arrival.snapshot.info for arrival in self._arrivals.values())
            endpoints = tuple(
                sorted(
                    peer.endpoints
                    for peer in infos
                    if peer and peer.endpoints and peer.role is not info.role and peer.fingerprint == info.fingerprint
                )
            )
            self._peers[key] = Peers(zlib.crc32(repr(endpoints).encode()), endpoints)
        return self._peers[key]

    def view(self, now_s: float) -> FleetView:
        """The fleet at this moment, for policy."""
        by_replica = self._promises_by_replica()
        ready = (
            _view(arrival.snapshot, arrival.snapshot.info, by_replica.get(replica_id, ()))
            for replica_id, arrival in sorted(self._arrivals.items())
            if arrival.snapshot.info is not None
            and arrival.snapshot.phase is Phase.READY
            and self._is_fresh(arrival, now_s)
        )
        infos = (arrival.snapshot.info for arrival in self._arrivals.values())
        known = {info.replica_id: info for info in (*self._shapes.values(), *infos) if info is not None}
        silent = {role for pool, role in self._pools.items() if pool not in self._shapes}
        return FleetView(tuple(ready), tuple(known.values()), tuple(sorted(silent)))

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

    def _confirm(self, snapshot: ReplicaSnapshot, now_s: float) -> None:
        listed = frozenset(snapshot.sessions)
        for key, promise in self._promises.items():
            if key[0] in listed and snapshot.replica_id in promise.replica_ids:
                self._promises[key] = replace(promise, seen_s=now_s)

    def _drop_released(self) -> None:
        for key, promise in list(self._promises.items()):
            if promise.released and not self._is_listed(promise):
                del self._promises[key]

    def _is_listed(self, promise: Promise) -> bool:
        arrivals = (self._arrivals[replica_id] for replica_id in promise.replica_ids if replica_id in self._arrivals)
        return any(promise.placement.session_id in arrival.snapshot.sessions for arrival in arrivals)

    def _promises_by_replica(self) -> dict[str, list[Promise]]:
        by_replica: dict[str, list[Promise]] = {}
        for promise in self._promises.values():
            for replica in {promise.placement.owner.replica_id, promise.prefiller.replica_id}:
                by_replica.setdefault(replica, []).append(promise)
        return by_replica


def _view(snapshot: ReplicaSnapshot, info: ReplicaInfo, promises: Sequence[Promise]) -> ReplicaView:
    """A replica's load: what is promised or what it reports, whichever is more.

    A session that it lists and the ledger does not know was promised before the session manager restarted.
    Nobody knows any more what it reserved, so what is used then counts on top of what is promised.
    """
    here = [promise for promise in promises if _holds(promise, snapshot)]
    promised = sum(promise.blocks_on(info.replica_id) for promise in here)
    ours = {promise.placement.session_id for promise in promises}
    unknown = sum(session_id not in ours for session_id in snapshot.sessions)
    taken = promised + snapshot.used_blocks if unknown else max(promised, snapshot.used_blocks)
    backlog = sum(
        promise.prompt_tokens
        for promise in here
        if promise.prefilling and promise.prefiller.replica_id == info.replica_id
    )
    return ReplicaView(
        info=info,
        free_blocks=max(0, info.total_blocks - taken),
        sessions=max(len(here) + unknown, snapshot.running + snapshot.waiting),
        backlog_tokens=max(backlog, snapshot.backlog_tokens),
    )


def _holds(promise: Promise, snapshot: ReplicaSnapshot) -> bool:
    """Whether a promise takes a place here: on its owner to the end, on a helper while it prefills."""
    if promise.released:
        return promise.placement.session_id in snapshot.sessions
    return promise.prefilling or promise.placement.owner.replica_id == snapshot.replica_id
