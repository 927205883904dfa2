"""The fleet: what every replica last reported, and what has been promised on it.

A snapshot is up to one interval old and a promise is known at once, so neither alone is the truth. The number
that placement relies on is hard: the blocks of a promise (prompt plus the longest answer) count from the
moment it is made until it is released *and* its replica no longer lists the session, or says that it has finished.
What is free by that count is free in the engine, so decoding never has to preempt.

Beside it goes what is expected (prompt plus predicted answer, predicted seconds of prefill), for comparing replicas.
Rows are made anew for the replicas that an event concerns, not for all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from deployments.fleet_view import Columns, FleetView, LiveView, ReplicaView, blocks_for
from deployments.messages import Peers, Phase, Placement, ReplicaInfo, ReplicaSnapshot, Role

Key = tuple[str, int]
"""A promise's identity: session id and epoch."""

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
    def prefiller(self) -> ReplicaInfo:
        """The replica that computes the prompt."""
        return self.placement.prefill or self.placement.owner

    @property
    def replica_ids(self) -> tuple[str, str]:
        """The replicas that work for the session, its owner first; decode may be called when prefill is over."""
        return self.placement.owner.replica_id, self.prefiller.replica_id

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that are expected to be computed."""
        return max(1, self.prompt_tokens - self.placement.cached_tokens)

    def blocks_on(self, replica_id: str) -> int:
        """Blocks taken on a replica: all on its owner; on a helper the prompt's, while prefilling."""
        if replica_id == self.placement.owner.replica_id:
            return 0 if self.finished else self.placement.reserved_blocks
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
        self._stale_rows: set[str] = set()
        self._shares: dict[str, dict[Key, Promise]] = {}
        self._begun_s: dict[str, float] = {}
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
        self._arrivals[snapshot.replica_id] = _Arrival(snapshot, now_s)
        if snapshot.info is not None:
            self._shapes[snapshot.info.pool] = snapshot.info
        self._stale_rows.add(snapshot.replica_id)
        self._confirm(snapshot, now_s)
        self._take_finished(snapshot, known.snapshot.finished_version if known else 0, now_s)
        self._drop_released(snapshot.replica_id)

    def forget(self, replica_id: str) -> None:
        """A replica is gone. Its promises stay until their sessions are closed."""
        self._arrivals.pop(replica_id, None)
        self._begun_s.pop(replica_id, None)
        self._peers.clear()
        self._known = None
        self._stale_rows.add(replica_id)
        self._drop_released(replica_id)

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
        prefiller = promise.prefiller.replica_id
        if not any(each.prefilling for each in self._shares.get(prefiller, {}).values()):
            self._begun_s[prefiller] = now_s
        self._put(promise)

    def prefill_done(self, session_id: str, epoch: int, now_s: float) -> bool:
        """The prompt is computed: it is no backlog any more, and the next one begins. True when that was news."""
        promise = self._promises.get((session_id, epoch))
        if promise is None or not promise.prefilling:
            return False
        self._prefilled(promise, now_s)
        return True

    def release(self, session_id: str, epoch: int) -> bool:
        """The session is over; idempotent. True when that was news.

        Its blocks still count on a replica whose newest snapshot lists the session: the engine has not freed
        them.
        """
        promise = self._promises.get((session_id, epoch))
        if promise is None or promise.released:
            return False
        self._put(replace(promise, released=True, prefilling=False))  # cancelled, perhaps: its prefill counts no more
        self._drop_released(promise.placement.owner.replica_id)
        return True

    def expire(self, now_s: float) -> tuple[Promise, ...]:
        """Drop promises that outlived their session or were never taken up, and replicas long silent."""
        expired = tuple(promise for promise in self._promises.values() if self._is_void(promise, now_s))
        for promise in expired:
            self._remove(promise)
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
        """The fleet at this moment by rows, for people."""
        ready = (
            self._row(arrival.snapshot)
            for replica_id, arrival in sorted(self._arrivals.items())
            if self._is_placeable(arrival.snapshot) and self._is_fresh(arrival, now_s)
        )
        return FleetView(tuple(ready), self._shapes_known(), self._silent(), now_s)

    def live(self, now_s: float) -> LiveView:
        """The fleet at this moment by columns, for policy; good until the next change."""
        for replica_id in self._stale_rows:
            self._refresh(replica_id)
        self._stale_rows.clear()
        by_role = {role: columns.at(now_s, self._stale_s) for role, columns in self._columns.items()}
        return LiveView(by_role, self._shapes_known(), self._silent(), now_s)

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
            known = {info.replica_id: info for info in (*self._shapes.values(), *infos) if info is not None}
            self._known = tuple(known.values())
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
        self._columns[role].put(self._row(snapshot), ready=ready, seen_s=arrival.at_s)

    def _row(self, snapshot: ReplicaSnapshot) -> ReplicaView:
        promises = self._shares.get(snapshot.replica_id, {}).values()
        return _view(snapshot, promises, self._begun_s.get(snapshot.replica_id, 0.0), self._overcommit)

    # ---- the ledger: every promise by its key, and by the replicas that it concerns

    def _put(self, promise: Promise) -> None:
        self._promises[promise.key] = promise
        for replica_id in promise.replica_ids:
            self._shares.setdefault(replica_id, {})[promise.key] = promise
            self._stale_rows.add(replica_id)

    def _remove(self, promise: Promise) -> None:
        del self._promises[promise.key]
        for replica_id in set(promise.replica_ids):
            share = self._shares[replica_id]
            del share[promise.key]
            if not share:
                del self._shares[replica_id]
            self._stale_rows.add(replica_id)

    def _confirm(self, snapshot: ReplicaSnapshot, now_s: float) -> None:
        share = self._shares.get(snapshot.replica_id)
        if share:
            listed = frozenset(snapshot.sessions)
            late_s = now_s - _SEEN_EVERY_S
            for promise in [each for key, each in share.items() if each.seen_s <= late_s and key[0] in listed]:
                self._put(replace(promise, seen_s=now_s))

    def _prefilled(self, promise: Promise, now_s: float) -> None:
        if promise.prefilling:
            self._begun_s[promise.prefiller.replica_id] = now_s
        self._put(replace(promise, prefilling=False))

    def _take_finished(self, snapshot: ReplicaSnapshot, known_version: int, now_s: float) -> None:
        """What ended on a replica since its last snapshot holds nothing there, whoever is yet to close it."""
        news = min(len(snapshot.finished), max(0, snapshot.finished_version - known_version))
        for part in snapshot.finished[len(snapshot.finished) - news :]:
            promise = self._promises.get((part.session_id, part.epoch))
            if promise is None:
                continue
            if promise.placement.owner.replica_id == snapshot.replica_id:
                promise = replace(promise, finished=True)
            self._prefilled(promise, now_s)

    def _drop_released(self, replica_id: str) -> None:
        for promise in list(self._shares.get(replica_id, {}).values()):
            if promise.released and not self._is_listed(promise):
                self._remove(promise)

    def _is_listed(self, promise: Promise) -> bool:
        arrivals = (self._arrivals[replica_id] for replica_id in promise.replica_ids if replica_id in self._arrivals)
        return any(promise.placement.session_id in arrival.snapshot.sessions for arrival in arrivals)


def _view(snapshot: ReplicaSnapshot, promises: Collection[Promise], begun_s: float, overcommit: float) -> ReplicaView:
    """A replica's load: what is promised or what it reports, whichever is more. `begun_s`: its first prompt's prefill.

    A session that it lists and the ledger does not know was promised before the session manager restarted.
    Nobody knows any more what it reserved, so what is used then counts on top of what is promised.
    """
    info = snapshot.info
    assert info is not None, "a row is of a replica that has told what it is"
    here = [promise for promise in promises if _holds(promise, snapshot)]
    promised = sum(promise.blocks_on(info.replica_id) for promise in here)
    ours = {promise.placement.session_id for promise in promises}
    unknown = sum(session_id not in ours for session_id in snapshot.sessions)
    taken = promised + snapshot.used_blocks if unknown else max(promised, snapshot.used_blocks)
    capacity = int(info.total_blocks * overcommit) if info.role is Role.DECODE else info.total_blocks
    prompts = [promise for promise in here if promise.prefilling and promise.prefiller.replica_id == info.replica_id]
    backlog = sum(promise.uncached_tokens for promise in prompts)
    work_s, busy_until_s, behind_s = _work(prompts, begun_s)
    owned = [promise for promise in here if promise.placement.owner.replica_id == info.replica_id]
    held = sum(promise.prompt_tokens + promise.placement.forecast.output_tokens / 2 for promise in owned)
    expected = sum(_expected_blocks(promise, info.block_size) for promise in owned)
    return ReplicaView(
        info=info,
        free_blocks=max(0, capacity - taken),
        sessions=max(len(here) + unknown, snapshot.running + snapshot.waiting),
        backlog_tokens=max(backlog, snapshot.backlog_tokens) if unknown else backlog,
        work_s=work_s,
        busy_until_s=busy_until_s,
        behind_s=behind_s,
        unknown_tokens=max(0, snapshot.backlog_tokens - backlog) if unknown else 0,
        expected_blocks=expected + snapshot.used_blocks if unknown else max(expected, snapshot.used_blocks),
        held_tokens=max(held, float(snapshot.running_tokens)),
    )


def _work(prompts: Sequence[Promise], begun_s: float) -> tuple[float, float, float]:
    """Seconds of predicted prefill, when the last of it should be over, and the seconds behind the first."""
    if not prompts:
        return 0.0, 0.0, 0.0
    work_s = sum(promise.placement.forecast.prefill_s for promise in prompts)
    return work_s, begun_s + work_s, work_s - prompts[0].placement.forecast.prefill_s


def _expected_blocks(promise: Promise, block_size: int) -> int:
    """What a session is expected to hold at its end: all of its promise where nobody predicted anything."""
    output = promise.placement.forecast.output_tokens
    if not output:
        return promise.placement.reserved_blocks
    return min(promise.placement.reserved_blocks, blocks_for(promise.prompt_tokens + int(output), block_size))


def _holds(promise: Promise, snapshot: ReplicaSnapshot) -> bool:
    """Whether a promise takes a place here: on its owner to the end, on a helper while it prefills."""
    is_owner = promise.placement.owner.replica_id == snapshot.replica_id
    if promise.finished:
        return False
    if promise.released:
        return promise.placement.session_id in snapshot.sessions
    return promise.prefilling or is_owner
