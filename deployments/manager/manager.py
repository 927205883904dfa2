"""The session manager: admits sessions, places them, and keeps the ledger of what it promised.

A thin shell around `policy.allocator`, which decides; here its answers meet those who wait for them. It is asked on
every event that may free capacity (a report, a close, a cancelled caller), and when a waiter is late. Nothing polls.
Plain Python: `app/main.py` makes the deployment, of exactly one replica.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from configs.schema import BatonConfig
from deployments.fleet.columns import ReplicaView
from deployments.fleet.ledger import Promise
from deployments.messages import (
    MANAGER_RETIRES,
    Admit,
    ManagerView,
    Phase,
    Placement,
    Reject,
    ReplicaSnapshot,
    ReportAnswer,
    Reservation,
    Role,
    SessionRequest,
)
from deployments.policy.allocator import Allocator

_LATE_S = 0.01
"""A timer may fire a little early; it is set this much later than the deadline it watches."""
ASK_AGAIN = Reject("the session manager is being replaced", 0.2, unavailable=True, code=MANAGER_RETIRES)

MOST_REPORTS_PER_S, LONGEST_INTERVAL_S = 500, 1.0
"""A report costs the manager a third to half a millisecond; a large fleet's replicas report less often than they may.
What was promised on a replica is known without reports. But a replica whose blocks are promised more than once says
what its sessions hold, and that is needed as soon as it can be had.
"""

LISTEN_S = 1.5
"""A replica reports every second, and what it could not tell while there was no manager it tells at once."""


class SessionManager:
    """Answers `open` with where a session goes; is told what became of it, and how the replicas are.

    `clock`: seconds, monotonic. `rng`: decides between equals. `listen_s`: seconds from the first call on in which it
    only listens, so that a restarted one knows the fleet and what runs on it before it places anything; replicas report
    every second. All methods run on one event loop.
    """

    def __init__(
        self,
        config: BatonConfig,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        listen_s: float = 0.0,
    ) -> None:
        self._clock, self._began_s, self._stale_s = clock, clock(), config.placement.snapshot_stale_s
        self._overcommit = config.placement.overcommit
        self._life, self._listen_s = secrets.token_hex(8), listen_s
        self._listens_until_s: float | None = None
        self._allocator = Allocator(config, rng or random.Random())
        self._waiting: dict[str, asyncio.Future[Admit | Reject]] = {}
        self._is_leaving = False
        self._modes: Counter[str] = Counter()
        self._rejects: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()

    async def open(self, request: SessionRequest) -> Admit | Reject:
        """Place a session; waits for capacity, at most the queue's timeout.

        A placement must be closed, whatever becomes of the session; until then its blocks are reserved.
        Opening the session again gives it a new epoch. A cancelled caller leaves nothing behind. Raises
        ValueError when the session is waiting already, or allows no mode.
        """
        if self._is_leaving:
            return ASK_AGAIN
        await self._listened()
        decision = self._allocator.open(request, self._clock())
        if decision is None:
            return await self._wait(request.session_id)
        self._tell()
        return self._counted(decision)

    def retire(self) -> None:
        """Another manager takes over: whoever waits here is to ask again, there. What is placed stays as it is."""
        self._is_leaving = True
        for session_id, answer in self._waiting.items():
            if not answer.done():
                self._allocator.abandon(session_id)
                answer.set_result(ASK_AGAIN)

    async def prefill_done(self, session_id: str, epoch: int) -> None:
        """The prompt is computed; idempotent. Its prefill replica has that much less to do."""
        if self._allocator.prefill_done(session_id, epoch, self._clock()):
            self._tell()

    async def close(
        self, session_id: str, epoch: int, outcome: str, output_tokens: int | None = None, ended: bool = False
    ) -> None:
        """The session is over; idempotent. Call it when the replicas' calls ended: their blocks are free.

        `epoch` 0 closes whichever is open, for good: that of a caller who left before it learnt of its placement.
        Calls may overtake each other, so its opening may still be on the way. `output_tokens`: what the answer came to.
        `ended`: its owner has answered, so that nothing of it is held there, whatever the newest report says.
        """
        now_s = self._clock()
        if not epoch:
            closed = self._allocator.withdraw(session_id, now_s)
        else:
            closed = int(self._allocator.close(session_id, epoch, outcome, now_s, output_tokens, ended))
        self._count(outcome, closed)
        self._tell()

    async def report(self, snapshot: ReplicaSnapshot) -> ReportAnswer:
        """A replica's load, on change, every 100 ms at most.

        Answers with its peers when it does not know them, and with the sessions that it is to let go. One that only
        listens yet does not know all replicas, and names none: those it left out would be forgotten.
        """
        now_s = self._clock()
        missed = self._allocator.report(snapshot, now_s)
        for part in snapshot.finished:
            if part.orphaned:
                closed = self._allocator.close(part.session_id, part.epoch, "orphaned", now_s)
                self._count("orphaned", int(closed))
        self._count("expired", len(self._allocator.sweep(now_s)))
        self._tell()
        interval_s = self._interval_s()
        if snapshot.info is None or self._listens_s() > 0:
            return ReportAnswer(resync=missed, hold=snapshot.is_starting, interval_s=interval_s)
        peers = self._allocator.fleet.peers(snapshot.info)
        news = peers if peers.version != snapshot.peers_version else None
        hold = snapshot.is_starting and self._allocator.fleet.is_out_of_step(snapshot.info, snapshot.phase, now_s)
        return ReportAnswer(news, missed, hold, self._allocator.sessions_to_move(snapshot, now_s), interval_s)

    def _interval_s(self) -> float:
        """How often a replica may report."""
        if self._overcommit > 1:
            return 0.0
        return min(len(self._allocator.fleet) / MOST_REPORTS_PER_S, LONGEST_INTERVAL_S)

    async def lost(self, replica_id: str, gone: bool = False) -> None:
        """A session was lost on a replica: nothing is placed on it for a while, and until it reports again.

        `gone`: Serve has taken it out, though it may go on reporting until it is stopped.
        """
        self._allocator.lost(replica_id, self._clock(), gone)
        self._tell()

    async def silent(self, replica_ids: Sequence[str]) -> tuple[str, ...]:
        """Those of these replicas that have not reported for `snapshot_stale_s`, or are not known at all.

        A manager that has just begun knows nobody yet, and calls nobody silent.
        """
        now_s = self._clock()
        has_listened = now_s - self._began_s >= self._stale_s
        return self._allocator.fleet.silent(replica_ids, now_s) if has_listened else ()

    async def view(self, after_s: float = 0.0) -> ManagerView:
        """What an ingress needs to place sessions while this manager is away. Answers after so many seconds: a call
        that is open breaks at once when the manager dies.
        """
        await asyncio.sleep(after_s)
        await self._listened()
        now_s = self._clock()
        shut, ready = self._allocator.breakers.shut(now_s), self._allocator.fleet.view(now_s).ready
        snapshots = (self._summed(view, now_s) for view in ready if view.info.replica_id not in shut)
        return ManagerView(self._life, tuple(snapshots))

    async def adopt(self, placement: Placement, prompt_tokens: int, prefilling: bool) -> None:
        """Count a session that somebody else has placed; it must be closed like all others. Raises ValueError when it
        is known here.
        """
        self._allocator.fleet.reserve(placement, prompt_tokens, self._clock())
        if not prefilling:
            await self.prefill_done(placement.session_id, placement.epoch)

    async def ready(self) -> dict[str, Any]:
        """Whether every pool of the configuration has a replica to place on, and every replica's phase.

        `{"ready", "pools": {name: {"ready", "replicas": {id: {"phase", "age_s", "fresh", "load"}}}}}`
        """
        now_s = self._clock()
        loads = {view.info.replica_id: _load(view) for view in self._allocator.fleet.view(now_s).ready}
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
            for pool, replicas in self._allocator.fleet.phases(now_s).items()
        }
        return {"ready": all(pool["ready"] for pool in pools.values()), "pools": pools}

    async def status(self) -> dict[str, Any]:
        """Everything there is to know: what `ready` says, sessions, promises, the queue, predictions, replicas.

        Counts start when the manager does.
        """
        now_s = self._clock()
        promises = self._allocator.fleet.promises()
        return {
            **await self.ready(),
            "sessions": {"open": len(promises), "queued": len(self._allocator.room), "closed": dict(self._outcomes)},
            "modes": dict(self._modes),
            "rejects": dict(self._rejects),
            "breakers": {name: round(left_s, 3) for name, left_s in self._allocator.breakers.shut(now_s).items()},
            "predictions": self._allocator.predictions(),
            "promises": [_promise(promise, now_s) for promise in promises],
            "replicas": {name: _numbers(each) for name, each in self._allocator.fleet.snapshots().items()},
        }

    async def check_health(self) -> None:
        """Serve calls this: an answer shows that the event loop runs. Nothing else here can break."""

    def _summed(self, view: ReplicaView, now_s: float) -> ReplicaSnapshot:
        info = view.info
        capacity = int(info.total_blocks * self._overcommit) if info.role is Role.DECODE else info.total_blocks
        held = Reservation(
            blocks=capacity - view.free_blocks,
            expected_blocks=view.expected_blocks,
            held_tokens=int(view.held_tokens),
            prefill_tokens=view.backlog_tokens,
            prefill_s=max(0.0, view.busy_until_s - now_s),
            pending=view.pending,
        )
        return ReplicaSnapshot(
            info.replica_id, 1, Phase.READY, info, running=view.sessions, sessions=("",), reservations=(held,)
        )

    def _listens_s(self) -> float:
        """For how long it only listens yet."""
        now_s = self._clock()
        if self._listens_until_s is None:
            self._listens_until_s = now_s + self._listen_s
        return self._listens_until_s - now_s

    async def _listened(self) -> None:
        if (left_s := self._listens_s()) > 0:
            await asyncio.sleep(left_s)

    async def _wait(self, session_id: str) -> Admit | Reject:
        answer: asyncio.Future[Admit | Reject] = asyncio.get_running_loop().create_future()
        self._waiting[session_id] = answer
        deadline_s = self._allocator.deadline_s(session_id)
        try:
            self._tell()
            while not answer.done():
                left_s = deadline_s - self._clock()
                await asyncio.wait({answer}, timeout=max(left_s, 0.0) + _LATE_S)
                self._tell()
            return answer.result()
        except asyncio.CancelledError:
            self._abandon(session_id, answer)
            raise
        finally:
            if self._waiting.get(session_id) is answer:
                del self._waiting[session_id]

    def _abandon(self, session_id: str, answer: asyncio.Future[Admit | Reject]) -> None:
        """The caller is gone: give up its place in the room, or the placement that it will not learn of."""
        self._count("abandoned", 1)
        del self._waiting[session_id]
        if answer.done() and isinstance(admit := answer.result(), Admit):
            self._allocator.close(session_id, admit.placement.epoch, "abandoned", self._clock())
        elif not answer.done():
            self._allocator.abandon(session_id)
        self._tell()

    def _tell(self) -> None:
        """Hand the allocator's answers to those who wait for them."""
        for session_id, decision in self._allocator.answers(self._clock()):
            if (answer := self._waiting.get(session_id)) is not None and not answer.done():
                answer.set_result(self._counted(decision))

    def _count(self, outcome: str, sessions: int) -> None:
        if sessions:
            self._outcomes[outcome] += sessions

    def _counted(self, decision: Admit | Reject) -> Admit | Reject:
        if isinstance(decision, Admit):
            self._modes[decision.placement.mode.value] += 1
        else:
            self._rejects[decision.code or "never_fits"] += 1
        return decision


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
        "cached_tokens": placement.cached_tokens,
        "forecast": asdict(placement.forecast),
        "age_s": round(now_s - promise.at_s, 3),
    }
