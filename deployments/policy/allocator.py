"""Who is served next, and where: one synchronous allocator for the session manager and the simulator. Pure.

It holds the fleet, the waiting room, the prefix index and the predictors, and is told of every event. Whoever asks is
answered at once or waits; after every event `answers` gives the answers to those who waited. Time and chance are
arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import BatonConfig
from deployments.fleet.columns import UNKNOWN
from deployments.fleet.fleet import Fleet
from deployments.fleet.ledger import Promise
from deployments.fleet.view import View
from deployments.messages import (
    Admit,
    Decision,
    Placement,
    Queue,
    Reject,
    ReplicaInfo,
    ReplicaSnapshot,
    Role,
    SessionRequest,
    StepSample,
)
from deployments.policy.admission.breakers import Breakers
from deployments.policy.admission.classes import PriorityClass, PriorityClasses
from deployments.policy.admission.objectives import times, verdict
from deployments.policy.admission.retry_budget import RETRY_AFTER_S, RETRY_BUDGET, RetryBudget
from deployments.policy.admission.waiting_room import WaitingRoom
from deployments.policy.chance import Chance
from deployments.policy.placement.baselines import POLICIES
from deployments.policy.placement.estimates import Knowledge, Limits
from deployments.policy.placement.place import PlacementSettings, claimed, place, takes
from deployments.policy.placement.relief import REST, Relief, Running, choose_moves, room_of
from deployments.policy.prediction.answer_length import LengthPredictor
from deployments.policy.prediction.prefix_index import PrefixIndex
from deployments.policy.prediction.step_time import StepModel
from deployments.step_cost import Coefficients

CLOSED = "the session was closed before it could be opened"

OVERTAKEN_S = 60.0
"""A call that another has overtaken arrives within this time."""

SWEEP_S = 1.0
"""Promises, replicas and cache entries that outlived their time are looked for so often."""

ENDED_WELL = ("stop", "length")
"""The outcomes of sessions that were answered to the end."""

TRUSTED_STEPS = 64
"""A pool's times are acted upon once so many of its steps were seen."""

LEARN_EVERY_S = 0.1
"""What steps are known to take changes so often; it changes little by little."""

AFFINITIES = 65_536
"""Affinity keys that are remembered."""

UNBOUNDED = float("inf")


@dataclass(slots=True)
class _Session:
    """A request that is waiting or placed, and what was known of it when it came."""

    request: SessionRequest
    knowledge: Knowledge
    since_s: float


@dataclass(slots=True)
class _Flow:
    """How fast the waiting are being served: the mean time from one to the next, old ones fading."""

    last_s: float | None = None
    gap_s: float | None = None

    def served(self, now_s: float) -> None:
        if self.last_s is not None:
            gap_s = now_s - self.last_s
            self.gap_s = gap_s if self.gap_s is None else 0.95 * self.gap_s + 0.05 * gap_s
        self.last_s = now_s

    def wait_s(self, ahead: int) -> float:
        return 0.0 if self.gap_s is None else ahead * self.gap_s


@dataclass(slots=True)
class _Pass:
    """One pass over the waiting: who needs no less than one who found no room finds none either."""

    none_for_tokens: float = UNBOUNDED
    why: Queue | None = None


class Allocator:
    """`rng` decides between equals. A pool's times start from what its first replica says of its hardware."""

    def __init__(self, config: BatonConfig, rng: Chance) -> None:
        placement = config.placement
        self._config, self._rng = placement, rng
        self._settings = settings_of(config)
        self._policy = POLICIES[placement.policy]()
        self._classes = PriorityClasses.of(placement)
        pools = {name: Role.PREFILL if name == "prefill" else Role.DECODE for name in config.pools}
        self.fleet = Fleet(pools, stale_s=placement.snapshot_stale_s, overcommit=placement.overcommit)
        self.room = WaitingRoom(
            placement.max_queued_requests, placement.queue_timeout_s, placement.queue_timeout_s, self._classes
        )
        self.index = PrefixIndex()
        self.lengths = LengthPredictor()
        self.models: dict[str, StepModel] = {}
        self._coefficients: dict[str, Coefficients] = {}
        self._learned_s = -LEARN_EVERY_S
        self._link_bytes_per_s = config.channel.link_bytes_per_s
        self._sessions: dict[str, _Session] = {}
        self._answers: dict[str, Admit | Reject] = {}
        self._pins: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._left: dict[str, float] = {}
        self._retries = RetryBudget()
        self.breakers = Breakers()
        self.relief = Relief(placement.snapshot_interval_s)
        self._flow = _Flow()
        self._swept_s = 0.0

    # ---- sessions

    def open(self, request: SessionRequest, now_s: float) -> Admit | Reject | None:
        """Place a session, refuse it, or let it wait (None): its answer is then among `answers`.

        What is placed must be closed. Opening a session again gives it a new epoch. Raises ValueError when the
        session is waiting already or allows no mode.
        """
        if not request.allowed:
            raise ValueError(f"session {request.session_id} allows no mode")
        if request.session_id in self.room:
            raise ValueError(f"session {request.session_id} is waiting already")
        if wrong := self._classes.refusal(request.priority):
            return wrong
        if request.session_id in self._left:
            return Reject(CLOSED)
        if request.attempt == 1:
            self._retries.opened(now_s)
        elif not request.moved_from and not request.progressed and not self._may_retry(now_s):
            return Reject("too many sessions are placed again", RETRY_AFTER_S, unavailable=True, code=RETRY_BUDGET)
        session = _Session(request, self._knowledge(request), now_s)
        if not self.room or request.moved_from:  # who is moved gives up what it has: it need not stand in line
            decision = self._decide(session, self._live(now_s, moving=bool(request.moved_from)), now_s)
            if not isinstance(decision, Queue):
                return self._settle(session, decision, now_s)
            request = session.request = replace(request, moved_from="")  # what it has left there will not wait for it
        elif (late := self._too_late(session, now_s)) is not None:
            return late
        entered = self.room.enter(request, now_s, session.knowledge.output_tokens or None)
        if isinstance(entered, Reject):
            return entered
        self._sessions[request.session_id] = session
        if entered.displaced is not None:
            self._answer(entered.displaced.request.session_id, entered.displaced.decision)
        self._dispatch(now_s)
        return self._answers.pop(request.session_id, None)

    def _may_retry(self, now_s: float) -> bool:
        return self._retries.take(now_s, max(len(self._sessions), len(self.fleet.promises())))

    def answers(self, now_s: float) -> list[tuple[str, Admit | Reject]]:
        """The answers to those who waited, each once. Call it after every event and at `next_deadline_s`."""
        self._dispatch(now_s)
        answers, self._answers = self._answers, {}
        return list(answers.items())

    def deadline_s(self, session_id: str) -> float:
        """When one of the waiting will have waited too long. Raises KeyError for one that does not wait."""
        return self.room.deadline_s(session_id)

    def next_deadline_s(self) -> float | None:
        """When the first of the waiting will have waited too long."""
        return self.room.next_deadline_s()

    def withdraw(self, session_id: str, now_s: float) -> int:
        """Whoever wanted this session does not any more, wherever its opening may be: waiting, or on the way.

        Closes what is open of it; returns how many placements that were.
        """
        self._left[session_id] = now_s
        if self.room.remove(session_id):
            self._answer(session_id, Reject(CLOSED))
        epochs = [promise.placement.epoch for promise in self.fleet.promises_of(session_id)]
        return sum(self.close(session_id, epoch, "cancelled", now_s) for epoch in epochs)

    def abandon(self, session_id: str) -> None:
        """A waiter is gone and needs no answer; idempotent."""
        if self.room.remove(session_id):
            self._sessions.pop(session_id, None)

    def prefill_done(self, session_id: str, epoch: int, now_s: float) -> bool:
        """The prompt is computed; idempotent. True when that was news."""
        is_news = self.fleet.prefill_done(session_id, epoch, now_s)
        if is_news and self.breakers:
            for promise in self.fleet.promises_of(session_id):
                self.breakers.succeeded(promise.placement.prefiller.replica_id)
        return is_news

    def close(
        self,
        session_id: str,
        epoch: int,
        outcome: str,
        now_s: float,
        output_tokens: int | None = None,
        ended: bool = False,
    ) -> bool:
        """The session is over; idempotent. True when that was news. `output_tokens`: what an answer came to.

        `ended`: see `Fleet.release`.
        """
        if self.breakers and outcome in ENDED_WELL:
            for promise in self.fleet.promises_of(session_id):
                self.breakers.succeeded(promise.placement.owner.replica_id)
        if not self.fleet.release(session_id, epoch, now_s, ended):
            return False
        if session_id not in self.room and not self.fleet.promises_of(session_id):
            session = self._sessions.pop(session_id, None)
            if session is not None and output_tokens and outcome in ENDED_WELL and session.request.attempt == 1:
                self.lengths.observe(session.request, output_tokens, finished_by_limit=outcome == "length")
        return True

    # ---- replicas

    def report(self, snapshot: ReplicaSnapshot, now_s: float) -> bool:
        """Take a replica's snapshot. True when its prefix cache must be told whole: something was missed."""
        self.fleet.update(snapshot, now_s)
        if snapshot.cache is not None:
            self.index.apply(snapshot.replica_id, snapshot.cache, now_s)
        if snapshot.info is None:
            return False
        self._learn(snapshot.info, snapshot.steps)
        return not self.index.knows(snapshot.replica_id)

    def _learn(self, info: ReplicaInfo, steps: Sequence[StepSample]) -> None:
        model = self.models.get(info.pool)
        if model is None:
            model = self.models[info.pool] = StepModel(Coefficients(*info.prior) if info.prior else UNKNOWN)
        for sample in steps:
            model.observe(sample)
        if info.pool not in self._coefficients and (info.prior or model.count >= TRUSTED_STEPS):
            self._coefficients = {**self._coefficients, info.pool: model.coefficients}

    def _live(self, now_s: float, moving: bool = False) -> View:
        """The fleet now. What was learned of steps is let in now and then, for it makes every row anew.

        `moving`: as a session sees it that is being moved.
        """
        if not self._learned_s <= now_s < self._learned_s + LEARN_EVERY_S:
            self._learned_s = now_s
            known = {pool: self.models[pool].coefficients for pool in self._coefficients}
            self._coefficients = self._coefficients if known == self._coefficients else known
        view = self.fleet.live(now_s, self._coefficients, self.breakers.shut(now_s) if self.breakers else ())
        barred = self.relief.pressed(now_s) if moving else self.relief.barred(now_s)
        return view.without_room_on(barred) if barred else view

    def sessions_to_move(self, snapshot: ReplicaSnapshot, now_s: float) -> tuple[str, ...]:
        """The sessions that a replica is to let go, because its blocks are running out and others have room."""
        if not self._settings.moves or not snapshot.held_tokens or snapshot.info is None:
            return ()
        model = self.models.get(snapshot.info.pool)
        steps = self.relief.steps(snapshot, model.coefficients if model else UNKNOWN)
        if snapshot.info.role is not Role.DECODE or not self.relief.is_pressed(snapshot, steps, now_s):
            return ()
        snapshots, barred = self.fleet.snapshots(), {*self.relief.pressed(now_s), *self.breakers.shut(now_s)}
        rooms = [
            room_of(view, snapshots[view.info.replica_id], REST * steps)
            for view in self.fleet.view(now_s).of(Role.DECODE)
            if view.info.replica_id not in barred and view.info.fingerprint == snapshot.info.fingerprint
        ]
        moves = choose_moves(snapshot, rooms, steps, self._may_hold)
        self.relief.keep(moves.values(), now_s)
        return tuple(moves)

    def _may_hold(self, running: Running, info: ReplicaInfo) -> bool:
        session = self._sessions.get(running.session_id)
        if session is None:
            return True  # who placed it knows; where it goes is asked again then
        whole = session.request.prompt_tokens + session.request.max_tokens
        rest = replace(session.request, prompt_tokens=running.held_tokens, max_tokens=whole - running.held_tokens)
        return takes(rest, info, self._settings.limits)

    def lost(self, replica_id: str, now_s: float, gone: bool = False) -> None:
        """A session was lost on a replica: nothing is placed on it for a while, and until it reports again.

        `gone`: Serve has taken it out.
        """
        self.breakers.lost(replica_id, now_s, gone)
        self.fleet.forget(replica_id)
        self.index.forget(replica_id)

    def sweep(self, now_s: float) -> tuple[Promise, ...]:
        """Forget what outlived its time; cheap to call often. Returns the promises that nobody closed."""
        if now_s - self._swept_s < SWEEP_S:
            return ()
        self._swept_s = now_s
        self._left = {session: at_s for session, at_s in self._left.items() if now_s - at_s < OVERTAKEN_S}
        known = set(self.fleet.snapshots())
        expired = self.fleet.expire(now_s)
        for replica_id in known - set(self.fleet.snapshots()):
            self.index.forget(replica_id)
        for promise in expired:
            if not self.fleet.promises_of(promise.placement.session_id):
                self._sessions.pop(promise.placement.session_id, None)
        self.index.sweep(now_s)
        return tuple(promise for promise in expired if not promise.released)

    def predictions(self) -> dict[str, Any]:
        """What was learned and how good it is, for the status.

        `{"steps": {pool: {name_s: seconds, "seen", "trusted"}}, "lengths": {coverage and error}, "index_blocks"}`
        """
        steps = {
            pool: model.coefficients._asdict() | {"seen": model.count, "trusted": model.count >= TRUSTED_STEPS}
            for pool, model in self.models.items()
        }
        return {"steps": steps, "lengths": self.lengths.calibration(), "index_blocks": len(self.index)}

    # ---- decisions

    def _knowledge(self, request: SessionRequest) -> Knowledge:
        length = self.lengths.predict(request)
        return Knowledge(
            hits=self.index.hits(request.hashes) if request.hashes else {},
            output_tokens=length.mean,
            trusted=frozenset(pool for pool, model in self.models.items() if model.count >= TRUSTED_STEPS),
            pinned=self._pins.get(request.affinity, frozenset()) if request.affinity else frozenset(),
            link_bytes_per_s=self._link_bytes_per_s,
        )

    def _decide(self, session: _Session, view: View, now_s: float) -> Decision:
        request = session.request
        priority = self._classes.resolve(request.priority)
        objectives = (priority.ttft_s or UNBOUNDED, priority.tpot_s or UNBOUNDED)
        decision = place(request, view, self._settings, self._policy, self._rng, session.knowledge, objectives)
        if not isinstance(decision, Admit) or not self._config.admission or request.attempt > 1:
            return decision
        refusal = verdict(
            decision.placement.forecast,
            priority,
            now_s - session.since_s,
            slack=self._config.admission_slack,
            max_retry_after_s=self._config.queue_timeout_s,
        )
        return refusal or decision

    def _too_late(self, session: _Session, now_s: float) -> Reject | None:
        """Early refusal of one who would wait behind others for longer than its class allows.

        What was admitted once is not refused so when it is placed again.
        """
        if session.request.attempt > 1:
            return None
        priority = self._classes.resolve(session.request.priority)
        ahead = self.room.ahead_of(session.request, now_s)
        wait_s = self._flow.wait_s(ahead)
        if not self._config.admission or wait_s <= self._ttft_limit_s(priority):
            return None
        reason = (
            f"predicted wait {wait_s:.1f} s behind {ahead} others, over {self._ttft(priority)} of class {priority.name}"
        )
        return Reject(reason, min(max(wait_s, 1.0), self._config.queue_timeout_s), code="predicted_ttft")

    def _dispatch(self, now_s: float) -> None:
        """Answer everybody who can be answered, and those who waited too long."""
        while self.room:
            view, tried = self._live(now_s), _Pass()

            def decide(request: SessionRequest, view: View, tried: _Pass = tried) -> Decision:
                return self._retry(request, view, tried, now_s)

            called = self.room.next_ready(view, decide, now_s, self._claimed)
            if called is None:
                break
            session = self._sessions[called.request.session_id]
            if isinstance(called.decision, Admit):
                self._flow.served(now_s)
            self._answer(called.request.session_id, self._settle(session, called.decision, now_s))
        self._expire(now_s)

    def _claimed(self, request: SessionRequest, view: View) -> str | None:
        return claimed(request, view, self._settings.limits)

    def _retry(self, request: SessionRequest, view: View, tried: _Pass, now_s: float) -> Decision:
        session = self._sessions[request.session_id]
        tokens = request.prompt_tokens + request.max_tokens
        if tried.why is not None and tokens >= tried.none_for_tokens and not self._settings.limits:
            return self._missed(session, tried.why, now_s) or tried.why
        decision = self._decide(session, view, now_s)
        if not isinstance(decision, Queue):
            return decision
        tried.none_for_tokens, tried.why = min(tokens, tried.none_for_tokens), decision
        return self._missed(session, decision, now_s) or decision

    def _missed(self, session: _Session, why: Queue, now_s: float) -> Reject | None:
        """Refusal of one who has waited in vain for longer than its class allows for the first token.

        What was admitted once is not refused so when it is placed again.
        """
        if session.request.attempt > 1:
            return None
        priority = self._classes.resolve(session.request.priority)
        waited_s, limit_s = now_s - session.since_s, self._ttft_limit_s(priority)
        trusted = self._config.admission and session.knowledge.trusted and not why.unavailable
        if not trusted or waited_s <= limit_s:
            return None
        reason = f"waited {waited_s:.1f} s, over {self._ttft(priority)} of class {priority.name}: {why.reason}"
        return Reject(reason, self.room.retry_after_s(now_s), code="predicted_ttft")

    def _ttft(self, priority: PriorityClass) -> str:
        return f"{times(self._config.admission_slack)}the {priority.ttft_s:g} s TTFT"

    def _ttft_limit_s(self, priority: PriorityClass) -> float:
        return UNBOUNDED if priority.ttft_s is None else self._config.admission_slack * priority.ttft_s

    def _expire(self, now_s: float) -> None:
        retry_after_s = self.room.retry_after_s(now_s)
        for request in self.room.expired(now_s):
            short = self._decide(self._sessions[request.session_id], self._live(now_s), now_s)
            why = short.reason if isinstance(short, Queue) else "others were waiting longer"
            unavailable = isinstance(short, Queue) and short.unavailable
            reason = f"no capacity within {self._config.queue_timeout_s:g} s: {why}"
            self._answer(request.session_id, Reject(reason, retry_after_s, unavailable, code="queue_timeout"))

    def _answer(self, session_id: str, decision: Admit | Reject) -> None:
        if isinstance(decision, Reject):
            self._sessions.pop(session_id, None)
        self._answers[session_id] = decision

    def _settle(self, session: _Session, decision: Admit | Reject, now_s: float) -> Admit | Reject:
        """Enter a decision into the books: from here on, somebody has to close the session."""
        if isinstance(decision, Reject):
            return decision
        request = session.request
        least = max(request.attempt, request.least_epoch)
        epoch = self.fleet.next_epoch(request.session_id, now_s, least)
        placement = replace(decision.placement, epoch=epoch)
        self.fleet.reserve(placement, request.prompt_tokens, now_s)
        self._sessions[request.session_id] = session
        self._remember(session, placement, now_s)
        return Admit(placement)

    def _remember(self, session: _Session, placement: Placement, now_s: float) -> None:
        request, hits = session.request, session.knowledge.hits
        replicas = {placement.owner.replica_id, placement.prefiller.replica_id}
        for replica_id in replicas if self.breakers else ():
            self.breakers.placed(replica_id, now_s)
        if request.hashes:
            known = min(hits.get(replica_id, 0) for replica_id in replicas)
            self.index.expect(sorted(replicas), request.hashes, now_s, known)
        if request.affinity:
            self._pins[request.affinity] = frozenset(replicas)
            self._pins.move_to_end(request.affinity)
            if len(self._pins) > AFFINITIES:
                self._pins.popitem(last=False)


def settings_of(config: BatonConfig) -> PlacementSettings:
    """What placement takes from the configuration."""
    placement = config.placement
    limits = {
        name: Limits(pool.min_prompt_tokens, pool.max_prompt_tokens, frozenset(pool.classes), frozenset(pool.adapters))
        for name, pool in config.pools.items()
        if pool.min_prompt_tokens or pool.max_prompt_tokens or pool.classes or pool.adapters
    }
    return PlacementSettings(
        split_min_prompt_tokens=placement.split_min_prompt_tokens,
        handoff_timeout_s=config.channel.handoff_timeout_s,
        session_timeout_s=placement.session_timeout_s,
        max_retry_after_s=placement.queue_timeout_s,
        split_always=placement.split == "always",
        prefill_queue_s=placement.prefill_queue_s,
        weights=placement.weights,
        limits=limits,
        moves=config.channel.kind != "vllm",
    )
