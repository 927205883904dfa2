"""The fleet: what every replica last reported, and what the ledger has reserved on it. Pure.

A snapshot is up to one reporting interval old, and a reservation is known at once, so neither alone is the truth.
Placement relies on a hard number: the blocks of a promise (prompt plus the longest answer) count from the moment it is
made until the session is closed *and* its replica no longer lists the session, or says that it has finished. What is
free by that count is free in the engine, so decoding never has to preempt.

A session that this ledger did not place (another one did, or this one before a restart) counts in the same way while
its replica lists it: the replica reports what is reserved for it.

Expected amounts (prompt plus predicted answer, predicted seconds of prefill) stand beside the hard ones. They serve to
compare replicas. An event makes new rows only for the replicas that it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from deployments.fleet.columns import Columns, ReplicaView
from deployments.fleet.exchange import is_ahead_of_partners, peers_of
from deployments.fleet.flow import Flow
from deployments.fleet.ledger import Ledger
from deployments.fleet.promise import Promise
from deployments.fleet.row import Arrival, reservable, row_of
from deployments.fleet.view import FleetView, LiveView
from deployments.messages import Finished, Peers, Phase, Placement, ReplicaInfo, ReplicaSnapshot, Role
from deployments.step_cost import Coefficients

_NO_COEFFICIENTS: Mapping[str, Coefficients] = {}


@dataclass(frozen=True, slots=True)
class ReplicaPhase:
    """A replica's phase and the age of its newest snapshot, for `/ready`. `fresh`: young enough to place on."""

    phase: Phase
    age_s: float
    fresh: bool


class Fleet:
    """The newest snapshot of each replica and the ledger. Times are seconds of the caller's clock.

    `pools`: the pools that the configuration names, with their roles. `stale_s`: a replica that is silent for longer
    gets no placements. `forget_s`: a replica that is silent for longer is forgotten. `overcommit`: the blocks of a
    decode replica that may be reserved, as a multiple of the blocks that it has. `slack_s`, `unconfirmed_s`: see
    `Ledger`. `set_aside`: the blocks of a replica that are for pinned prefixes; after a change, call
    `set_aside_changed`.
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
        fetches: bool = False,
        set_aside: Callable[[ReplicaInfo], int] = lambda info: 0,
    ) -> None:
        self._pools, self._fetches, self._set_aside = dict(pools), fetches, set_aside
        self._stale_s = stale_s
        self._forget_s = forget_s
        self._overcommit = overcommit
        self._columns = Columns()
        self._stale_rows: dict[str, None] = {}  # in order, so that a run can be repeated
        self._ledger = Ledger(self._stale_rows, slack_s, unconfirmed_s)
        self._flows: dict[str, Flow] = {}
        self._arrivals: dict[str, Arrival] = {}
        self._shapes: dict[str, ReplicaInfo] = {}
        self._known: tuple[ReplicaInfo, ...] | None = None
        self._peers: dict[tuple[bool, str], Peers] = {}

    def __len__(self) -> int:
        """The number of replicas that have reported and are not forgotten."""
        return len(self._arrivals)

    # ---- replicas

    def update(self, snapshot: ReplicaSnapshot, now_s: float) -> None:
        """Take a replica's snapshot. One that is older than the newest is ignored."""
        replica_id = snapshot.replica_id
        before = self._arrivals.get(replica_id)
        if before is not None and snapshot.version <= before.snapshot.version:
            return
        if before is None or before.snapshot.info != snapshot.info:
            self._forget_shapes()
        arrival = self._arrivals[replica_id] = Arrival(snapshot, now_s, frozenset(snapshot.sessions))
        if snapshot.info is not None:
            self._shapes[snapshot.info.pool] = snapshot.info
        self._stale_rows[replica_id] = None
        self._ledger.put_unpromised(replica_id, snapshot.sessions, snapshot.reservations, now_s)
        self._ledger.confirm(replica_id, arrival.listed, now_s)
        known_version = before.snapshot.finished_version if before else 0
        news = min(len(snapshot.finished), max(0, snapshot.finished_version - known_version))
        self._ledger.finish(replica_id, snapshot.finished[len(snapshot.finished) - news :], now_s)
        self._remove_released(replica_id, now_s)

    def forget(self, replica_id: str) -> None:
        """A replica is gone. Its promises stay until their sessions are closed."""
        self._arrivals.pop(replica_id, None)
        self._flows.pop(replica_id, None)
        self._forget_shapes()
        self._stale_rows[replica_id] = None
        self._ledger.put_unpromised(replica_id, (), (), 0.0)
        self._remove_released(replica_id, 0.0)

    def set_aside_changed(self) -> None:
        """Another number of blocks is set aside on some replicas."""
        self._stale_rows |= dict.fromkeys(self._arrivals)

    def has_room_to_pin(self, snapshot: ReplicaSnapshot) -> bool:
        """Whether what is promised on a replica leaves all that is set aside there."""
        info = snapshot.info
        if info is None:
            return False
        missing = max(0, self._set_aside(info) - snapshot.pinned_blocks)
        reserved, most = self._ledger.share(snapshot.replica_id).blocks, reservable(info, self._overcommit)
        is_promised = self._overcommit == 1.0 and reserved + self._set_aside(info) > most
        return not is_promised and snapshot.used_blocks + missing <= info.total_blocks

    def snapshots(self) -> Mapping[str, ReplicaSnapshot]:
        """The newest snapshot of every replica, by replica id."""
        return {replica_id: arrival.snapshot for replica_id, arrival in self._arrivals.items()}

    def empty(self) -> tuple[str, ...]:
        """The replicas whose caches have hardly anything, as those that have just started."""
        return tuple(each for each, arrival in self._arrivals.items() if arrival.is_empty)

    def silent(self, replica_ids: Iterable[str], now_s: float) -> tuple[str, ...]:
        """Those of these replicas that are stale or unknown."""
        arrivals = ((replica_id, self._arrivals.get(replica_id)) for replica_id in replica_ids)
        return tuple(each for each, arrival in arrivals if arrival is None or not self._is_fresh(arrival, now_s))

    def phases(self, now_s: float) -> dict[str, dict[str, ReplicaPhase]]:
        """Every pool that the configuration names or that was seen, with the phases of its replicas by replica id."""
        pools: dict[str, dict[str, ReplicaPhase]] = {pool: {} for pool in self._pools}
        for replica_id, arrival in sorted(self._arrivals.items()):
            snapshot = arrival.snapshot
            pool = snapshot.info.pool if snapshot.info is not None else snapshot.pool
            phase = ReplicaPhase(snapshot.phase, now_s - arrival.at_s, self._is_fresh(arrival, now_s))
            pools.setdefault(pool, {})[replica_id] = phase
        return pools

    def peers(self, info: ReplicaInfo) -> Peers:
        """The replicas that this one may exchange KV with; see `exchange.peers_of`."""
        key = info.decodes, info.fingerprint
        if key not in self._peers:
            others = (arrival.snapshot.info for arrival in self._arrivals.values())
            self._peers[key] = peers_of(info, others, self._fetches)
        return self._peers[key]

    def is_out_of_step(self, info: ReplicaInfo, phase: Phase, now_s: float) -> bool:
        """Whether a starting replica must wait for a partner; see `exchange.is_ahead_of_partners`."""
        fresh = (arrival.snapshot for arrival in self._arrivals.values() if self._is_fresh(arrival, now_s))
        return is_ahead_of_partners(info, phase, fresh)

    # ---- sessions

    def next_epoch(self, session_id: str, now_s: float, least: int = 1) -> int:
        """The epoch of a session's next placement; see `Ledger.next_epoch`."""
        return self._ledger.next_epoch(session_id, now_s, least)

    def reserve(self, placement: Placement, prompt_tokens: int, now_s: float) -> None:
        """Reserve what a placement needs. Raises ValueError when that session and epoch have a promise."""
        self._ledger.reserve(placement, prompt_tokens, now_s)
        if not placement.is_move:
            self._flow(placement.prefiller.replica_id).prompt(placement.forecast.prefill_s, now_s)
        if placement.owner is not placement.prefiller:
            size = prompt_tokens * placement.owner.kv_bytes_per_token
            self._flow(placement.owner.replica_id).move(size, now_s)

    def prefill_done(self, session_id: str, epoch: int, now_s: float) -> bool:
        """The prompt is computed: it leaves the backlog, and the next one begins. True when that was new."""
        return self._ledger.prefill_done(session_id, epoch, now_s)

    def release(self, session_id: str, epoch: int, now_s: float, ended: bool = False) -> bool:
        """The session is closed; idempotent. True when that was new.

        Its blocks still count on a replica whose newest snapshot lists the session, because the engine has not freed
        them yet. `ended`: the owner has said since that snapshot that its part is over, so that it holds nothing.
        """
        released = self._ledger.release(session_id, epoch, now_s, ended)
        if released is not None and not self._is_listed(released):
            self._ledger.remove(released, now_s)
        return released is not None

    def may_let_go(self, replica_id: str) -> tuple[Promise, ...]:
        """The answers that a replica may let go for another session."""
        return tuple(self._ledger.share(replica_id).yielding.values())

    def let_go(self, promise: Promise, now_s: float) -> None:
        """The owner is being told to let this session go: from now on, it holds nothing there."""
        self._ledger.finish(promise.placement.owner.replica_id, (Finished(*promise.key, 0),), now_s)

    def expire(self, now_s: float) -> tuple[Promise, ...]:
        """Drop the promises and the replicas whose time is over. Returns the promises dropped."""
        expired = self._ledger.expire(now_s)
        for replica_id, arrival in list(self._arrivals.items()):
            if now_s - arrival.at_s > self._forget_s:
                self.forget(replica_id)
        self._ledger.forget_epochs(now_s - self._forget_s)
        self._flows = {each: flow for each, flow in self._flows.items() if each in self._arrivals}
        return expired

    def promises(self) -> tuple[Promise, ...]:
        """The promises of open sessions, oldest first."""
        return self._ledger.promises()

    def promises_of(self, session_id: str) -> tuple[Promise, ...]:
        """The open promises of one session, by epoch: usually one, or none."""
        return self._ledger.promises_of(session_id)

    # ---- views

    def view(self, now_s: float) -> FleetView:
        """The fleet now, by rows: for people."""
        ready = (
            self._row(arrival)
            for _, arrival in sorted(self._arrivals.items())
            if arrival.is_placeable and self._is_fresh(arrival, now_s)
        )
        return FleetView(tuple(ready), self._shapes_known(), self._silent_roles(), now_s)

    def live(
        self,
        now_s: float,
        coefficients: Mapping[str, Coefficients] | None = None,
        shut: Collection[str] = (),
        waiting: int = 0,
    ) -> LiveView:
        """The fleet now, by columns: for policy. It is valid until the next change.

        `coefficients`: what the steps of each pool take; a new object when they have changed. `shut`: replicas that
        count as not ready. `waiting`: the requests that wait to be placed.
        """
        for replica_id in self._stale_rows:
            self._refresh(replica_id)
        self._stale_rows.clear()
        self._columns.learn(coefficients or _NO_COEFFICIENTS)
        columns = self._columns.at(now_s, self._stale_s)
        if shut:
            columns = columns.without(shut)
        return LiveView(columns, self._shapes_known(), self._silent_roles(), now_s, waiting, self._ledger.yielding)

    def row(self, replica_id: str) -> ReplicaView | None:
        """A replica's row now; None where it has not reported its shape."""
        arrival = self._arrivals.get(replica_id)
        return None if arrival is None or arrival.snapshot.info is None else self._row(arrival)

    def _refresh(self, replica_id: str) -> None:
        arrival = self._arrivals.get(replica_id)
        if arrival is None or arrival.snapshot.info is None:
            self._columns.drop(replica_id)
            return
        self._columns.put(self._row(arrival), ready=arrival.is_placeable, seen_s=arrival.at_s)

    def _row(self, arrival: Arrival) -> ReplicaView:
        replica_id = arrival.snapshot.replica_id
        flow = self._flows.get(replica_id) or Flow()
        set_aside = 0 if arrival.snapshot.info is None else self._set_aside(arrival.snapshot.info)
        return row_of(arrival, self._ledger.share(replica_id), self._overcommit, flow, set_aside)

    def _flow(self, replica_id: str) -> Flow:
        return self._flows.setdefault(replica_id, Flow())

    def _is_fresh(self, arrival: Arrival, now_s: float) -> bool:
        return now_s - arrival.at_s <= self._stale_s

    def _shapes_known(self) -> tuple[ReplicaInfo, ...]:
        if self._known is None:
            infos = (arrival.snapshot.info for arrival in self._arrivals.values())
            shapes = (*self._shapes.values(), *(info for info in infos if info is not None))
            self._known = tuple({_shape(info): info for info in shapes}.values())
        return self._known

    def _forget_shapes(self) -> None:
        self._peers.clear()
        self._known = None

    def _silent_roles(self) -> tuple[Role, ...]:
        return tuple(sorted({role for pool, role in self._pools.items() if pool not in self._shapes}))

    def _remove_released(self, replica_id: str, now_s: float) -> None:
        for promise in list(self._ledger.share(replica_id).released.values()):
            if not self._is_listed(promise):
                self._ledger.remove(promise, now_s)

    def _is_listed(self, promise: Promise) -> bool:
        arrivals = (self._arrivals[replica_id] for replica_id in promise.replica_ids if replica_id in self._arrivals)
        return any(promise.placement.session_id in arrival.listed for arrival in arrivals)


def _shape(info: ReplicaInfo) -> tuple[object, ...]:
    """What decides which requests fit. Replicas of a pool are alike, except during an update."""
    return info.pool, info.total_blocks, info.block_size, info.max_model_len
