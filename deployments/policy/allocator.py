"""The allocator: which session is placed next, and where, for the session manager and the simulator. Pure.

It holds the fleet, the waiting room and the predictors, and is told of every event. A request is answered at once, or
it waits; after every event `answers` gives the answers of those that waited. Time and randomness are arguments.
"""

from __future__ import annotations

from dataclasses import replace

from configs.schema import BatonConfig, role_of
from deployments.fleet.fleet import Fleet
from deployments.fleet.promise import Promise
from deployments.fleet.view import LiveView, View
from deployments.messages import Admit, Decision, Queue, Reject, ReplicaSnapshot, Role, SessionRequest
from deployments.policy.admission.breakers import Breakers
from deployments.policy.admission.cordon import Cordon
from deployments.policy.admission.entry import CLOSED, Entry
from deployments.policy.admission.waiting_room import WaitingRoom
from deployments.policy.chance import Chance
from deployments.policy.decider import Decider, OpenSession, Tried
from deployments.policy.giving_way import GivingWay
from deployments.policy.moves import Moves
from deployments.policy.pins import pins_of
from deployments.policy.predictors import Predictors
from deployments.policy.spread import Copy, spread_of

SWEEP_S = 1.0
"""The least time between two searches for promises, replicas and cache entries whose time is over."""

ENDED_WELL = ("stop", "length")  # the outcomes of sessions that were answered to the end


class Allocator:
    """Sessions in, placements out, and the books of both. `rng` decides between equals."""

    def __init__(self, config: BatonConfig, rng: Chance) -> None:
        placement = config.placement
        self._queue_timeout_s = placement.queue_timeout_s
        self.decider, self.pins = Decider(config, rng), pins_of(config)
        self.fleet = Fleet(
            {name: Role(role_of(name)) for name in config.pools},
            stale_s=placement.snapshot_stale_s,
            overcommit=placement.overcommit,
            fetches=placement.fetch,
            set_aside=self.pins.set_aside,
        )
        self.room = WaitingRoom(
            placement.max_queued_requests, placement.queue_timeout_s, placement.queue_timeout_s, self.decider.classes
        )
        self.predictors = Predictors(config.channel.link_bytes_per_s)
        self.breakers, self.cordon = Breakers(), Cordon()
        self.entry, self.spread = Entry(self.decider.classes), spread_of(config)
        self._moves = Moves(self.decider, self.fleet, self.breakers, placement.snapshot_interval_s)
        self.giving_way = GivingWay(self.decider, self.fleet)
        self._sessions: dict[str, OpenSession] = {}
        self._answers: dict[str, Admit | Reject] = {}
        self._swept_s = 0.0

    # ---- sessions

    def open(self, request: SessionRequest, now_s: float) -> Admit | Reject | None:
        """Place a session, refuse it, or let it wait (None): its answer is then among `answers`.

        A placed session must be closed. Opening a session again gives it a new epoch. Raises ValueError when the
        session waits already or allows no mode.
        """
        if not request.allowed:
            raise ValueError(f"session {request.session_id} allows no mode")
        if request.session_id in self.room:
            raise ValueError(f"session {request.session_id} is waiting already")
        if refusal := self.entry.refuse_opening(request, self._open_sessions, now_s):
            return refusal
        session = OpenSession(request, self.predictors.knowledge(request), now_s)
        if request.moved_from or not self.room.holds_up(request):  # what moves frees what it has, and need not queue
            decision = self.decider.decide(session, self.live(now_s, moving=bool(request.moved_from)), now_s)
            if not isinstance(decision, Queue):
                return self._settle(session, decision, now_s)
            # The replica that gives the session up does not keep its KV for so long: it queues as if it had none.
            session.request = replace(request, moved_from="")
        elif (late := self.decider.refuse_queueing(session, self.room.ahead_of(request, now_s))) is not None:
            return late
        return self._enter(session, now_s)

    def _open_sessions(self) -> int:
        return max(len(self._sessions), len(self.fleet.promises()))

    def _enter(self, session: OpenSession, now_s: float) -> Admit | Reject | None:
        """Let a session wait; its answer where it gets one in the same moment."""
        session_id = session.request.session_id
        takes_s = self.decider.takes_s(session, self.live(now_s))
        entered = self.room.enter(session.request, now_s, session.knowledge.output_tokens or None, takes_s)
        if isinstance(entered, Reject):
            return entered
        self._sessions[session_id] = session
        if entered.displaced is not None:
            self._answer(entered.displaced.request.session_id, entered.displaced.decision)
        self._dispatch(now_s)
        return self._answers.pop(session_id, None)

    def answers(self, now_s: float) -> list[tuple[str, Admit | Reject]]:
        """The answers to requests that waited, each once. Call it after every event and at `room.next_deadline_s`."""
        self._dispatch(now_s)
        answers, self._answers = self._answers, {}
        return list(answers.items())

    def withdraw(self, session_id: str, now_s: float) -> int:
        """Take back a session whose opening may wait here, may be placed, or may still be on its way.

        Closes what is open of it. Returns the number of placements closed.
        """
        self.entry.withdrawn(session_id, now_s)
        if self.room.remove(session_id):
            self._answer(session_id, CLOSED)
        epochs = [promise.placement.epoch for promise in self.fleet.promises_of(session_id)]
        return sum(self.close(session_id, epoch, "cancelled", now_s) for epoch in epochs)

    def abandon(self, session_id: str) -> None:
        """Remove a waiting request whose caller is gone: it gets no answer; idempotent."""
        if self.room.remove(session_id):
            self._sessions.pop(session_id, None)

    def prefill_done(self, session_id: str, epoch: int, now_s: float) -> bool:
        """The prompt is computed; idempotent. True when that was new."""
        is_new = self.fleet.prefill_done(session_id, epoch, now_s)
        if is_new:
            self.predictors.computed(session_id, now_s)
        if is_new and self.breakers:
            for promise in self.fleet.promises_of(session_id):
                self.breakers.succeeded(promise.placement.prefiller.replica_id)
        return is_new

    def close(
        self,
        session_id: str,
        epoch: int,
        outcome: str,
        now_s: float,
        output_tokens: int | None = None,
        ended: bool = False,
    ) -> bool:
        """The session is over; idempotent. True when that was new. `output_tokens`: the length of its answer.

        `ended`: see `Fleet.release`.
        """
        if self.breakers and outcome in ENDED_WELL:
            for promise in self.fleet.promises_of(session_id):
                self.breakers.succeeded(promise.placement.owner.replica_id)
        if not self.fleet.release(session_id, epoch, now_s, ended):
            return False
        if self.fleet.promises_of(session_id):
            return True
        self.predictors.computed(session_id, now_s)
        if session_id not in self.room:
            session = self._sessions.pop(session_id, None)
            if session is not None and output_tokens and outcome in ENDED_WELL:
                self.predictors.lengths.observe(session.request, output_tokens, finished_by_limit=outcome == "length")
        return True

    # ---- replicas

    def report(self, snapshot: ReplicaSnapshot, now_s: float) -> bool:
        """Take a replica's snapshot. True when the replica must report its whole prefix cache: a change was missed."""
        self.fleet.update(snapshot, now_s)
        if snapshot.cache is not None:
            self.predictors.index.apply(snapshot.replica_id, snapshot.cache, now_s)
        if snapshot.info is None:
            return False
        self.predictors.adapters.apply(snapshot.replica_id, snapshot.adapters)
        self.predictors.learn_steps(snapshot.info, snapshot.steps)
        return not self.predictors.index.knows(snapshot.replica_id)

    def sessions_to_move(self, snapshot: ReplicaSnapshot, now_s: float) -> tuple[str, ...]:
        """The sessions that a replica gives up now: they give way and it was not told, it drains, its blocks run out,
        or they cost less elsewhere.

        While requests wait, none moves for its costs: what has room is theirs.
        """
        if late := self.giving_way.late(snapshot, now_s):
            return late
        if not snapshot.held_tokens or snapshot.info is None:
            return ()
        if snapshot.replica_id in self.cordon:
            return self._moves.away(snapshot, self._sessions, self.live(now_s, moving=True))
        steps = self.predictors.steps_of(snapshot.info.pool)
        if moves := self._moves.choose(snapshot, steps, self._sessions, now_s):
            return moves
        if self.room.pressing or not self._moves.is_time_to_rebalance(snapshot, now_s):
            return ()
        return self._moves.rebalance(snapshot, self._sessions, self.live(now_s, moving=True))

    def copy_to(self, snapshot: ReplicaSnapshot, now_s: float) -> Copy | None:
        """The hot prefix that a replica that reports this is to fetch now; None: none."""
        if self.spread is None or snapshot.info is None:
            return None
        if self.spread.is_due(now_s):
            self.spread.plan(self.live(now_s).columns, self.predictors.index.find, self.fleet.empty(), now_s)
        return self.spread.next_for(snapshot.replica_id, now_s)

    def lost(self, replica_id: str, now_s: float, gone: bool = False, crashed: bool = False) -> None:
        """A session was lost on a replica. It gets no placements for a while, and none until it reports again.

        `gone`: Serve has taken the replica out. `crashed`: its engine has crashed.
        """
        if crashed:
            self.entry.crashed(replica_id, self._digests_on(replica_id), now_s)
        self.breakers.lost(replica_id, now_s, gone)
        self.fleet.forget(replica_id)
        self.predictors.forget(replica_id)
        self.giving_way.forget(replica_id)
        if gone:
            self.cordon.forget(replica_id)

    def _digests_on(self, replica_id: str) -> set[int]:
        """The requests that have a part on a replica."""
        there = (p.placement.session_id for p in self.fleet.promises() if replica_id in p.replica_ids)
        return {self._sessions[each].request.digest for each in there if each in self._sessions} - {0}

    def sweep(self, now_s: float) -> tuple[Promise, ...]:
        """Forget what has outlived its time; cheap to call often. Returns the promises that no call has closed."""
        if now_s - self._swept_s < SWEEP_S:
            return ()
        self._swept_s = now_s
        self.entry.sweep(now_s)
        known = set(self.fleet.snapshots())
        expired = self.fleet.expire(now_s)
        for replica_id in known - set(self.fleet.snapshots()):
            self.predictors.forget(replica_id)
            self.cordon.forget(replica_id)
            self.giving_way.forget(replica_id)
        for promise in expired:
            if not self.fleet.promises_of(promise.placement.session_id):
                self.predictors.computed(promise.placement.session_id, now_s)
                self._sessions.pop(promise.placement.session_id, None)
        self.predictors.index.sweep(now_s)
        return tuple(promise for promise in expired if not promise.released)

    # ---- decisions

    def live(self, now_s: float, moving: bool = False) -> LiveView:
        """The fleet now, as a new session sees it, or one that moves."""
        shut = (*self.cordon, *(self.breakers.shut(now_s) if self.breakers else ()))
        view = self.fleet.live(now_s, self.predictors.coefficients(now_s), shut, self.room.pressing)
        barred = self._moves.barred(now_s, moving)
        return view.without_room_on(barred) if barred else view

    def _dispatch(self, now_s: float) -> None:
        """Answer every waiting request that can be answered, and those that have waited too long."""
        while self.room:
            view, tried = self.live(now_s), Tried()

            def decide(request: SessionRequest, view: View, tried: Tried = tried) -> Decision:
                session, retry_after_s = self._sessions[request.session_id], self.room.retry_after_s(now_s)
                return self.decider.try_again(session, view, tried, now_s, retry_after_s)

            called = self.room.next_ready(view, decide, now_s, self.decider.claimed)
            if called is None:
                break
            session = self._sessions[called.request.session_id]
            if isinstance(called.decision, Admit):
                self.decider.placed_from_queue(now_s)
            self._answer(called.request.session_id, self._settle(session, called.decision, now_s))
        self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        retry_after_s = self.room.retry_after_s(now_s)
        for request in self.room.expired(now_s):
            session = self._sessions[request.session_id]
            short = self.decider.decide(session, self.live(now_s), now_s)
            why = short.reason if isinstance(short, Queue) else "others were waiting longer"
            unavailable = isinstance(short, Queue) and short.unavailable
            waited_s = max(self._queue_timeout_s, int(now_s - session.since_s))
            reason = f"no capacity within {waited_s:g} s: {why}"
            self._answer(request.session_id, Reject(reason, retry_after_s, unavailable, code="queue_timeout"))

    def _answer(self, session_id: str, decision: Admit | Reject) -> None:
        if isinstance(decision, Reject):
            self._sessions.pop(session_id, None)
        self._answers[session_id] = decision

    def _settle(self, session: OpenSession, decision: Admit | Reject, now_s: float) -> Admit | Reject:
        """Enter a decision into the books. A session that is placed must be closed from here on."""
        if isinstance(decision, Reject):
            return decision
        request, placement = session.request, decision.placement
        least = max(request.attempt, request.least_epoch)
        epoch = self.fleet.next_epoch(request.session_id, now_s, least)
        steps = self.predictors.steps_of(placement.owner.pool)
        placement = self.giving_way.settle(request, replace(placement, epoch=epoch), steps, now_s)
        self.fleet.reserve(placement, request.prompt_tokens, now_s)
        self._sessions[request.session_id] = session
        replicas = {placement.owner.replica_id, placement.prefiller.replica_id}
        for replica_id in replicas if self.breakers else ():
            self.breakers.placed(replica_id, now_s)
        self.predictors.placed(request, replicas, session.knowledge.hits, now_s)
        if self.spread is not None:
            steps = self.predictors.steps_of(placement.prefiller.pool)
            self.spread.placed(request, placement, session.knowledge.hits, steps, now_s)
        return Admit(placement)
