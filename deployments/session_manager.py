"""The session manager: admits sessions, places them, and keeps the ledger of what it promised.

A thin shell around `fleet` and `policy/`. One synchronous allocator, `_dispatch`, answers whoever can be
answered; it runs on every event that may free capacity (a report, a close, a cancelled caller), and when a
waiter is late. Nothing polls. Plain Python: `app/main.py` makes the deployment, of exactly one replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from configs.schema import BatonConfig
from deployments.fleet import Fleet, FleetView, Promise, ReplicaView
from deployments.messages import (
    Admit,
    Decision,
    Phase,
    Queue,
    Reject,
    ReplicaSnapshot,
    ReportAnswer,
    Role,
    SessionRequest,
)
from deployments.policy.admission import WaitingRoom
from deployments.policy.placement import PlacementSettings, place

_LATE_S = 0.01
"""A timer may fire a little early; it is set this much later than the deadline it watches."""

_SWEEP_S = 1.0
"""Promises and replicas that outlived their time are looked for so often."""

_OVERTAKEN_S = 60.0
"""A call that another has overtaken arrives within this time."""


_CLOSED = "the session was closed before it could be opened"


class SessionManager:
    """Answers `open` with where a session goes; is told what became of it, and how the replicas are.

    `clock`: seconds, monotonic. All methods run on one event loop.
    """

    def __init__(self, config: BatonConfig, clock: Callable[[], float] = time.monotonic) -> None:
        placement = config.placement
        self._clock = clock
        self._settings = PlacementSettings(
            split_min_prompt_tokens=placement.split_min_prompt_tokens,
            handoff_timeout_s=config.channel.handoff_timeout_s,
            session_timeout_s=placement.session_timeout_s,
            max_retry_after_s=placement.queue_timeout_s,
        )
        pools = {name: Role.PREFILL if name == "prefill" else Role.DECODE for name in config.pools}
        self._fleet = Fleet(pools, stale_s=placement.snapshot_stale_s)
        self._queue_timeout_s = placement.queue_timeout_s
        self._room = WaitingRoom(
            placement.max_queued_requests, placement.queue_timeout_s, self._settings.max_retry_after_s
        )
        self._answers: dict[str, asyncio.Future[Admit | Reject]] = {}
        self._left: dict[str, float] = {}
        self._swept_s = clock()
        self._modes: Counter[str] = Counter()
        self._rejects: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()

    async def open(self, request: SessionRequest) -> Admit | Reject:
        """Place a session; waits for capacity, at most the queue's timeout.

        A placement must be closed, whatever becomes of the session; until then its blocks are reserved.
        Opening the session again gives it a new epoch. A cancelled caller leaves nothing behind. Raises
        ValueError when the session is waiting already, or allows no mode.
        """
        if not request.allowed:
            raise ValueError(f"session {request.session_id} allows no mode")
        now_s = self._clock()
        if request.session_id in self._left:
            return Reject(_CLOSED)
        if not self._room:
            decision = self._place(request, self._fleet.view(now_s))
            if not isinstance(decision, Queue):
                return self._settle(request, decision)
        position = self._room.enter(request, now_s)
        if isinstance(position, Reject):
            self._rejects["queue_full"] += 1
            return position
        return await self._wait(request)

    async def prefill_done(self, session_id: str, epoch: int) -> None:
        """The prompt is computed; idempotent. Its prefill replica has that much less to do."""
        if self._fleet.prefill_done(session_id, epoch):
            self._dispatch()

    async def close(self, session_id: str, epoch: int, outcome: str) -> None:
        """The session is over; idempotent. Call it when the replicas' calls ended: their blocks are free.

        `epoch` 0 closes whichever is open, for good: that of a caller who left before it learnt of its placement.
        Calls may overtake each other, so its opening may still be on the way.
        """
        if not epoch:
            self._leave(session_id)
        epochs = [epoch] if epoch else [p.placement.epoch for p in self._fleet.promises_of(session_id)]
        released = [self._fleet.release(session_id, each) for each in epochs]
        if any(released):
            self._outcomes[outcome] += 1
            self._dispatch()

    async def report(self, snapshot: ReplicaSnapshot) -> ReportAnswer:
        """A replica's load, every 100 ms and on change. Answers with its peers when it does not know them."""
        now_s = self._clock()
        self._fleet.update(snapshot, now_s)
        if now_s - self._swept_s >= _SWEEP_S:
            self._swept_s = now_s
            self._outcomes["expired"] += sum(not promise.released for promise in self._fleet.expire(now_s))
            self._left = {session: at_s for session, at_s in self._left.items() if now_s - at_s < _OVERTAKEN_S}
        self._dispatch()
        if snapshot.info is None:
            return ReportAnswer()
        peers = self._fleet.peers(snapshot.info)
        return ReportAnswer(peers if peers.version != snapshot.peers_version else None)

    async def lost(self, replica_id: str) -> None:
        """A replica is gone, says an ingress or Serve: nothing is placed on it until it reports again."""
        self._fleet.forget(replica_id)
        self._dispatch()

    async def ready(self) -> dict[str, Any]:
        """Whether every pool of the configuration has a replica to place on, and every replica's phase.

        `{"ready", "pools": {name: {"ready", "replicas": {id: {"phase", "age_s", "fresh", "load"}}}}}`
        """
        now_s = self._clock()
        loads = {view.info.replica_id: _load(view) for view in self._fleet.view(now_s).ready}
        pools = {
            pool: {
                "ready": any(replica.fresh and replica.phase is Phase.READY for replica in replicas.values()),
                "replicas": {
                    replica_id: {
                        "phase": replica.phase.value,
                        "age_s": round(replica.age_s, 3),
                        "fresh": replica.fresh,
                        "load": loads.get(replica_id, {}),
                    }
                    for replica_id, replica in replicas.items()
                },
            }
            for pool, replicas in self._fleet.phases(now_s).items()
        }
        return {"ready": all(pool["ready"] for pool in pools.values()), "pools": pools}

    async def status(self) -> dict[str, Any]:
        """Everything there is to know: what `ready` says, sessions, promises, the queue, numbers per replica.

        Counts start when the manager does.
        """
        now_s = self._clock()
        promises = self._fleet.promises()
        return {
            **await self.ready(),
            "sessions": {"open": len(promises), "queued": len(self._room), "closed": dict(self._outcomes)},
            "modes": dict(self._modes),
            "rejects": dict(self._rejects),
            "promises": [_promise(promise, now_s) for promise in promises],
            "replicas": {replica_id: _numbers(snapshot) for replica_id, snapshot in self._fleet.snapshots().items()},
        }

    async def check_health(self) -> None:
        """Serve calls this: an answer shows that the event loop runs. Nothing else here can break."""

    def _place(self, request: SessionRequest, view: FleetView) -> Decision:
        return place(request, view, self._settings)

    def _settle(self, request: SessionRequest, decision: Admit | Reject) -> Admit | Reject:
        """Enter a decision into the ledger: from here on, somebody has to close the session."""
        if isinstance(decision, Reject):
            self._rejects["never_fits"] += 1
            return decision
        now_s = self._clock()
        epoch = self._fleet.next_epoch(request.session_id, now_s)
        placement = replace(decision.placement, epoch=epoch)
        self._fleet.promise(placement, request.prompt_tokens, now_s)
        self._modes[placement.mode.value] += 1
        return Admit(placement)

    async def _wait(self, request: SessionRequest) -> Admit | Reject:
        answer: asyncio.Future[Admit | Reject] = asyncio.get_running_loop().create_future()
        self._answers[request.session_id] = answer
        try:
            self._dispatch()
            while not answer.done():
                left_s = self._room.deadline_s(request.session_id) - self._clock()
                await asyncio.wait({answer}, timeout=max(left_s, 0.0) + _LATE_S)
                if not answer.done():
                    self._dispatch()
            return answer.result()
        except asyncio.CancelledError:
            self._abandon(request.session_id, answer)
            raise
        finally:
            if self._answers.get(request.session_id) is answer:
                del self._answers[request.session_id]

    def _abandon(self, session_id: str, answer: asyncio.Future[Admit | Reject]) -> None:
        """The caller is gone: give up its place in the room, or the placement that it will not learn of."""
        self._outcomes["abandoned"] += 1
        self._room.leave(session_id)
        if answer.done() and isinstance(admit := answer.result(), Admit):
            self._fleet.release(session_id, admit.placement.epoch)
        self._dispatch()

    def _leave(self, session_id: str) -> None:
        """Whoever wanted this session does not any more, wherever its opening may be: waiting here, or on the way."""
        self._left[session_id] = self._clock()
        if self._room.leave(session_id):
            self._answers[session_id].set_result(Reject(_CLOSED))

    def _dispatch(self) -> None:
        """Answer every waiter that can be answered now, and those who waited too long."""
        if not self._room:
            return
        now_s = self._clock()
        view = self._fleet.view(now_s)
        while called := self._room.next_ready(view, self._place, now_s):
            self._answers[called.request.session_id].set_result(self._settle(called.request, called.decision))
            view = self._fleet.view(now_s)
        retry_after_s = self._room.retry_after_s(now_s)
        for request in self._room.expired(now_s):
            self._rejects["timeout"] += 1
            self._answers[request.session_id].set_result(self._too_late(request, view, retry_after_s))

    def _too_late(self, request: SessionRequest, view: FleetView, retry_after_s: float) -> Reject:
        short = self._place(request, view)
        why = short.reason if isinstance(short, Queue) else "others were waiting longer"
        unavailable = isinstance(short, Queue) and short.unavailable
        return Reject(f"no capacity within {self._queue_timeout_s:g} s: {why}", retry_after_s, unavailable)


def _load(view: ReplicaView) -> dict[str, Any]:
    info = view.info
    return {
        "total_blocks": info.total_blocks,
        "free_blocks": view.free_blocks,
        "sessions": view.sessions,
        "max_sessions": info.max_sessions,
        "backlog_tokens": view.backlog_tokens,
    }


def _numbers(snapshot: ReplicaSnapshot) -> dict[str, Any]:
    """What a replica says of itself."""
    info = snapshot.info
    return {
        "pool": info.pool if info else snapshot.pool,
        "role": info.role.value if info else None,
        "node_id": info.node_id if info else None,
        "phase": snapshot.phase.value,
        "version": snapshot.version,
        "total_blocks": info.total_blocks if info else 0,
        "used_blocks": snapshot.used_blocks,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "backlog_tokens": snapshot.backlog_tokens,
        "sessions": len(snapshot.sessions),
        "counters": dict(snapshot.counters),
    }


def _promise(promise: Promise, now_s: float) -> dict[str, Any]:
    placement = promise.placement
    return {
        "session_id": placement.session_id,
        "epoch": placement.epoch,
        "mode": placement.mode.value,
        "reason": placement.reason,
        "decode": placement.decode.replica_id if placement.decode else None,
        "prefill": placement.prefill.replica_id if placement.prefill else None,
        "reserved_blocks": placement.reserved_blocks,
        "prompt_tokens": promise.prompt_tokens,
        "prefilling": promise.prefilling,
        "age_s": round(now_s - promise.at_s, 3),
    }
