"""The session manager: admits sessions, places them, and keeps the ledger of what it promised.

It is a thin shell around `policy.allocator`, which decides. The shell passes the decisions to the callers that wait for
them. The allocator is asked at every event that may free capacity (a report, a close, a cancelled caller), and when a
waiting session's time is up. Nothing polls. Plain Python: `app/main.py` makes the deployment, of exactly one replica.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import assert_never, cast

from configs.checks import bounds_of
from configs.schema import BatonConfig
from deployments.manager import status
from deployments.manager.adapters import LoadedAdapters
from deployments.manager.calls import (
    A,
    Adopt,
    Answer,
    AnyCall,
    Brought,
    Call,
    Close,
    Drain,
    Explain,
    HandOn,
    Lost,
    Open,
    Overview,
    PrefillDone,
    Prefixes,
    Ready,
    Report,
    ShareAdapters,
    Silent,
    Status,
    TellPrefix,
    View,
    Withdraw,
)
from deployments.manager.draining import Draining
from deployments.manager.hot import HotPrefixes
from deployments.manager.meter import ManagerMeter
from deployments.manager.own_sessions import occupancy
from deployments.manager.prefixes import PinnedPrefixes
from deployments.manager.report_pace import interval_s
from deployments.manager.scaling import Scaling, Size
from deployments.manager.traffic import Traffic
from deployments.messages import (
    MANAGER_RETIRES,
    Admit,
    ManagerView,
    Reject,
    ReplicaSnapshot,
    ReportAnswer,
    SessionRequest,
)
from deployments.metrics.registry import Registry
from deployments.policy.admission.quotas import Quotas
from deployments.policy.allocator import Allocator
from deployments.policy.explain import explain

_LATE_S = 0.01
"""A timer may fire a little early, so it is set this much later than the deadline that it watches."""
ASK_AGAIN = Reject("the session manager is being replaced", 0.2, unavailable=True, code=MANAGER_RETIRES)

LISTEN_S = 1.5
"""Seconds in which a restarted manager only listens. A replica reports every second. What it could not report while
there was no manager, it reports at once."""


class SessionManager:
    """Answers the calls of `deployments.manager.calls`, where each says what it does.

    `clock`: seconds, monotonic. `rng`: decides between equals. `listen_s`: seconds from the first call on in which the
    manager only listens. So a restarted manager knows the fleet and what runs on it before it places anything.
    `traffic`: told of every session. All methods run on one event loop. `scaling`: makes no plan until `plan` runs;
    None where the configuration has none.
    """

    def __init__(
        self,
        config: BatonConfig,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        listen_s: float = 0.0,
        traffic: Traffic | None = None,
    ) -> None:
        self._clock, self._began_s, self._stale_s = clock, clock(), config.placement.snapshot_stale_s
        self._life, self._listen_s = secrets.token_hex(8), listen_s
        self._listens_until_s: float | None = None
        self._allocator = Allocator(config, rng or random.Random())
        self._waiting: dict[str, asyncio.Future[Admit | Reject]] = {}
        self._overcommit, self._retires, self._counts = config.placement.overcommit, False, status.Counts()
        self._may_be_empty = frozenset(name for name, pool in config.pools.items() if bounds_of(pool)[0] == 0)
        self.scaling = Scaling(config, config.scaling, self._allocator, clock) if config.scaling else None
        self._traffic = Traffic() if traffic is None else traffic
        self._adapters, self._quotas = LoadedAdapters(), Quotas()
        self._prefixes, self._hot = PinnedPrefixes(self._allocator), HotPrefixes(self._allocator)
        self._draining = Draining(self._allocator, config.channel.link_bytes_per_s, clock)

    async def ask(self, call: Call[A]) -> A:
        """The answer to a call. Raises ValueError for a call that must not be made."""
        # mypy cannot see that each case gives its own call's answer.
        return cast(A, await self._answer(cast(AnyCall, call)))

    async def _answer(self, call: AnyCall) -> Answer:
        now_s = self._clock()
        match call:
            case Report(snapshot):
                return self._report(snapshot, now_s)
            case Open(request):
                return self._hot.asks(request, await self._open(request))
            case PrefillDone(session_id, epoch):
                if self._allocator.prefill_done(session_id, epoch, now_s):
                    self._tell()
            case Close():
                self._close(call, now_s)
            case Withdraw(session_id, outcome):
                self._counts.closed(outcome, self._allocator.withdraw(session_id, now_s))
                self._traffic.closed(session_id, outcome, now_s)
                self._quotas.withdrawn(session_id)
                self._tell()
            case Lost(replica_id, gone, crashed):
                self._allocator.lost(replica_id, now_s, gone, crashed)
                self._tell()
            case Silent(replica_ids):
                has_listened = now_s - self._began_s >= self._stale_s
                return self._allocator.fleet.silent(replica_ids, now_s) if has_listened else ()
            case View(after_s):
                return await self._view(after_s)
            case Ready():
                return status.ready(self._allocator, now_s, self._may_be_empty)
            case Status():
                shown = status.status(self._allocator, self._counts, now_s, self._may_be_empty, self.scaling)
                return {**shown, "keys": self._quotas.describe(now_s)}
            case Overview():
                return status.overview(self._allocator, self._counts, now_s, self._may_be_empty, self.scaling)
            case Explain(request):
                await self._listened()
                return explain(self._allocator, request, self._clock())
            case Prefixes():
                await self._listened()
                return await self._prefixes.ask(call)
            case TellPrefix(name, prefix):
                self._hot.told(name, prefix)
            case Drain() | HandOn() | Brought():
                return await self._draining.answer(call)
            case Adopt(placement, prompt_tokens, prefilling):
                self._allocator.fleet.reserve(placement, prompt_tokens, now_s)
                if not prefilling:
                    self._allocator.prefill_done(placement.session_id, placement.epoch, now_s)
            case ShareAdapters():
                return await self._adapters.share(call)
            case _:
                assert_never(call)
        return None

    def meter(self, registry: Registry) -> ManagerMeter:
        """What brings this manager's metrics up to date in `registry`."""
        return ManagerMeter(registry, self._allocator, self._counts, self._draining.counts, self.scaling, self._clock)

    async def plan(self, sizes: Callable[[], Awaitable[Mapping[str, Size] | None]]) -> None:
        """Make plans of sizes, without end: see `Scaling.run`. Without `scaling` there is nothing to do."""
        if self.scaling is not None:
            await self.scaling.run(sizes, self._tell)

    def retire(self) -> None:
        """Another manager takes over: callers that wait here must ask that one. What is placed stays as it is."""
        self._retires = True
        for session_id, answer in self._waiting.items():
            if not answer.done():
                self._allocator.abandon(session_id)
                self._traffic.decided(session_id, ASK_AGAIN)
                answer.set_result(ASK_AGAIN)

    async def check_health(self) -> None:
        """Serve calls this: an answer shows that the event loop runs. Nothing else here can break."""

    # ---- one method a call, where it takes more than a line

    async def _open(self, request: SessionRequest) -> Admit | Reject:
        if self._retires:
            return ASK_AGAIN
        arrived_s = self._clock()
        await self._listened()
        now_s = self._clock()
        decision = self._quotas.open(request, now_s) or self._allocator.open(request, now_s)
        self._traffic.opened(request, arrived_s)
        if decision is None:
            return await self._wait(request.session_id)
        self._tell()
        return self._decided(request.session_id, decision)

    def _decided(self, session_id: str, decision: Admit | Reject) -> Admit | Reject:
        """Note the decision. Returns it as the caller gets it."""
        self._counts.decided(decision)
        self._traffic.decided(session_id, decision)
        return self._quotas.decided(session_id, decision, self._clock())

    def _close(self, call: Close, now_s: float) -> None:
        is_closed = self._allocator.close(
            call.session_id, call.epoch, call.outcome, now_s, call.output_tokens, call.ended
        )
        self._counts.closed(call.outcome, int(is_closed))
        self._traffic.closed(call.session_id, call.outcome, now_s, call.epoch, call.output_tokens)
        self._quotas.closed(call.session_id, call.epoch, call.outcome, call.output_tokens, now_s)
        self._tell()

    def _report(self, snapshot: ReplicaSnapshot, now_s: float) -> ReportAnswer:
        """Take in a replica's report.

        A manager that still only listens does not know all replicas, so it names no peers. Otherwise the replica would
        forget the peers that are left out.
        """
        missed = self._allocator.report(snapshot, now_s) | self._prefixes.took(snapshot)
        for part in snapshot.finished:
            if part.orphaned:
                is_closed = self._allocator.close(part.session_id, part.epoch, "orphaned", now_s)
                self._counts.closed("orphaned", int(is_closed))
                self._traffic.closed(part.session_id, "orphaned", now_s, part.epoch)
                self._quotas.closed(part.session_id, part.epoch, "orphaned", part.output_tokens, now_s)
        expired = [promise.placement for promise in self._allocator.sweep(now_s)]
        self._counts.closed("expired", len(expired))
        for placement in expired:
            self._traffic.closed(placement.session_id, "expired", now_s, placement.epoch)
            self._quotas.closed(placement.session_id, placement.epoch, "expired", None, now_s)
        self._traffic.sweep(now_s)
        self._tell()
        pause_s = interval_s(len(self._allocator.fleet), self._overcommit)
        if snapshot.info is None or self._listens_s() > 0:
            return ReportAnswer(resync=missed, hold=snapshot.is_starting, interval_s=pause_s)
        peers = self._allocator.fleet.peers(snapshot.info)
        news = peers if peers.version != snapshot.peers_version else None
        hold = snapshot.is_starting and self._allocator.fleet.is_out_of_step(snapshot.info, snapshot.phase, now_s)
        moves, drains = self._allocator.sessions_to_move(snapshot, now_s), self._allocator.cordon.told(snapshot)
        pins, bring = self._prefixes.told(snapshot, now_s), self._draining.due(snapshot.replica_id)
        copy = self._hot.copy_to(snapshot, now_s)
        return ReportAnswer(news, missed, hold, moves, pause_s, drains, *pins, bring, copy)

    async def _view(self, after_s: float) -> ManagerView:
        await asyncio.sleep(after_s)
        await self._listened()
        now_s = self._clock()
        shut, ready = self._allocator.breakers.shut(now_s), self._allocator.fleet.view(now_s).ready
        replicas = (occupancy(view, self._overcommit, now_s) for view in ready if view.info.replica_id not in shut)
        return ManagerView(self._life, tuple(replicas))

    # ---- waiting

    def _listens_s(self) -> float:
        """Seconds in which the manager still only listens; 0 or less when that is over."""
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
        try:
            self._tell()
            while not answer.done():
                left_s = self._allocator.room.deadline_s(session_id) - self._clock()
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
        self._counts.closed("abandoned", 1)
        self._traffic.closed(session_id, "abandoned", self._clock())
        self._quotas.withdrawn(session_id)
        del self._waiting[session_id]
        if answer.done() and isinstance(admit := answer.result(), Admit):
            self._allocator.close(session_id, admit.placement.epoch, "abandoned", self._clock())
        elif not answer.done():
            self._allocator.abandon(session_id)
        self._tell()

    def _tell(self) -> None:
        """Pass the allocator's decisions on to the callers that wait for them."""
        for session_id, decision in self._allocator.answers(self._clock()):
            if (answer := self._waiting.get(session_id)) is not None and not answer.done():
                answer.set_result(self._decided(session_id, decision))
