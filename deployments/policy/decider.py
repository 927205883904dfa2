"""One request before the fleet: where it is placed, whether it waits, or why it is refused early. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from configs.schema import BatonConfig
from deployments.fleet.view import LiveView, View
from deployments.messages import MOVED, Admit, Decision, Mode, Queue, Reject, SessionRequest
from deployments.policy.admission.classes import PriorityClass, PriorityClasses
from deployments.policy.admission.objectives import times, verdict
from deployments.policy.chance import Chance
from deployments.policy.placement.baselines import POLICIES
from deployments.policy.placement.explain import candidates, decision_of, request_of
from deployments.policy.placement.field import TURN_SHARE, Field, PlacementSettings, claimed, most_tokens
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.limits import Limits
from deployments.policy.placement.place import place
from deployments.policy.placement.rebalance import saved_s
from deployments.policy.placement.relief import Running

NEW_GAP = 0.05
"""The weight of the newest gap in the mean gap: one that is more than some 20 placements old hardly counts."""


@dataclass(slots=True)
class OpenSession:
    """A request that waits or is placed. `knowledge`: what was known of it when it arrived, at `since_s`."""

    request: SessionRequest
    knowledge: Knowledge
    since_s: float


Taking = tuple[int, ...]
"""Which of the pools that have limits take a request, 0 or 1 each, and how many handoffs of it have failed."""


@dataclass(slots=True)
class Tried:
    """What one pass over the waiting requests has tried: the fewest tokens for which one found no room, and why.

    A request that needs as many tokens or more finds none either, where the same pools take it and as many handoffs of
    it have failed, so the pass does not try it. `no_turn`: the classes of which a request had room but no turn, with
    the reason. How long a queue it may join depends on its class alone.
    """

    no_room: dict[Taking, tuple[int, Queue]] = field(default_factory=dict)
    no_turn: dict[tuple[Taking, str], Queue] = field(default_factory=dict)

    def known(self, taking: Taking, tokens: int, class_name: str) -> Queue | None:
        """Why such a request finds no place, where this pass knows that already."""
        least, why = self.no_room.get(taking, (math.inf, None))
        return why if tokens >= least else self.no_turn.get((taking, class_name))

    def note(self, taking: Taking, tokens: int, class_name: str, why: Queue) -> None:
        """A request found no place."""
        if why.for_turn:
            self.no_turn[taking, class_name] = why
        else:
            least, _ = self.no_room.get(taking, (tokens, why))
            self.no_room[taking] = min(tokens, least), why


@dataclass(slots=True)
class _Flow:
    """How fast waiting requests are placed: the mean time from one to the next, in which old gaps fade."""

    last_s: float | None = None
    gap_s: float | None = None

    def placed(self, now_s: float) -> None:
        """A waiting request was placed."""
        if self.last_s is not None:
            gap_s = now_s - self.last_s
            self.gap_s = gap_s if self.gap_s is None else (1.0 - NEW_GAP) * self.gap_s + NEW_GAP * gap_s
        self.last_s = now_s

    def wait_s(self, ahead: int) -> float:
        """The predicted wait behind so many others; 0 while nothing is known."""
        return 0.0 if self.gap_s is None else ahead * self.gap_s


class Decider:
    """Places with the configured policy, and refuses early what cannot meet its class. `rng` decides between equals."""

    def __init__(self, config: BatonConfig, rng: Chance) -> None:
        self._config, self._rng = config.placement, rng
        self.settings = settings_of(config)
        self.policy = POLICIES[config.placement.policy]()
        self.classes = PriorityClasses.of(config)
        self._flow = _Flow()

    def decide(self, session: OpenSession, view: View, now_s: float) -> Decision:
        """Where a session goes now, or why it must wait or is refused.

        A session that is placed again is not refused early: it was admitted once. One that has no place beside sessions
        that yield goes where it has one without them (`giving_way`).
        """
        priority = self.classes.resolve(session.request.priority)
        decision = self._judged(session, view, priority, now_s)
        if priority.yields or not _lacks_room(decision) or (without := view.without_yielding()) is None:
            return decision
        instead = self._judged(session, without, priority, now_s)
        return instead if isinstance(instead, Admit) else decision

    def _judged(self, session: OpenSession, view: View, priority: PriorityClass, now_s: float) -> Decision:
        decision = self._placed(session, view, priority)
        if not isinstance(decision, Admit) or not self._config.admission or session.request.attempt > 1:
            return decision
        refusal = verdict(
            decision.placement.forecast,
            priority,
            now_s - session.since_s,
            slack=self._config.admission_slack,
            max_retry_after_s=self._config.queue_timeout_s,
        )
        return refusal or decision

    def _placed(self, session: OpenSession, view: View, priority: PriorityClass) -> Decision:
        """Where a session goes. After a handoff that failed, another replica prefills, or one replica does all.

        After a second one, one replica does all.
        """
        if failed := session.request.failed_handoffs:
            if len(failed) == 1:
                elsewhere = place(self._field(session, view.without(failed), priority), self.policy)
                if isinstance(elsewhere, Admit):
                    return elsewhere
            session = _whole(session)
        return place(self._field(session, view, priority), self.policy)

    def explain(self, session: OpenSession, view: View, ahead: int, now_s: float) -> dict[str, Any]:
        """What would become of a request that came now, and why. `ahead`: how many wait before it.

        `{"policy", "request", "decision"}`, and with the policy `joint` what `placement.explain.candidates` gives.
        """
        priority = self.classes.resolve(session.request.priority)
        here = self._field(session, view, priority)
        decision = self.decide(session, view, now_s)
        if ahead and not isinstance(decision, Reject):
            decision = self.refuse_queueing(session, ahead) or Queue(f"{ahead} requests wait before it", for_turn=True)
        return {
            "policy": self._config.policy,
            "request": request_of(here) | {"class": priority.name},
            "decision": decision_of(decision),
            **(candidates(here) if self._config.policy == "joint" else {}),
        }

    def _field(self, session: OpenSession, view: View, priority: PriorityClass) -> Field:
        objectives = (priority.ttft_s or math.inf, priority.tpot_s or math.inf)
        known = session.knowledge
        return Field(session.request, view, self.settings, known, self._rng, objectives, priority.yields)

    def takes_s(self, session: OpenSession, view: View) -> float:
        """The predicted seconds from a placement of this request until its first token, on the fastest replica."""
        priority = self.classes.resolve(session.request.priority)
        if priority.ttft_s is None:
            return 0.0
        here = self._field(session, view, priority)
        able = here.columns.ready & here.columns.prefills
        if not able.any():
            return 0.0
        return TURN_SHARE * priority.ttft_s + float(here.outlook.prefill_s[able].min())

    def saved_s(self, session: OpenSession, answer: Running, left_tokens: float, view: LiveView, source: str) -> float:
        """The seconds that a move of a running answer saves; see `rebalance.saved_s`.

        `left_tokens`: what it is expected to write yet. `view`: the fleet without it. `source`: where it runs.
        """
        return saved_s(self._rest(session, answer, left_tokens, view), view.columns.rows[source])

    def has_room_elsewhere(
        self, session: OpenSession, answer: Running, left_tokens: float, view: LiveView, source: str
    ) -> bool:
        """Whether a running answer could move now, with its KV, from the replica where it runs."""
        decision = place(self._rest(session, answer, left_tokens, view, source), self.policy)
        return isinstance(decision, Admit) and decision.placement.reason == MOVED

    def _rest(
        self, session: OpenSession, answer: Running, left_tokens: float, view: LiveView, moved_from: str = ""
    ) -> Field:
        """What is left of a running answer, before the fleet."""
        held, request = answer.held_tokens, session.request
        left = replace(
            request, prompt_tokens=held, max_tokens=most_tokens(request) - held, hashes=(), moved_from=moved_from
        )
        knowledge = replace(session.knowledge, hits={}, resident={}, output_tokens=left_tokens, pinned=frozenset())
        rest = OpenSession(left, knowledge, session.since_s)
        return self._field(rest, view, self.classes.resolve(request.priority))

    def claimed(self, request: SessionRequest, view: View) -> str | None:
        """The replica that a request claims when it has waited for long; see `field.claimed`."""
        return claimed(request, view, self.settings.limits)

    def placed_from_queue(self, now_s: float) -> None:
        """A waiting request was placed."""
        self._flow.placed(now_s)

    def refuse_queueing(self, session: OpenSession, ahead: int) -> Reject | None:
        """The refusal of a request whose predicted wait behind `ahead` others is longer than its class allows.

        A session that is placed again is not refused so: it was admitted once.
        """
        if session.request.attempt > 1:
            return None
        priority = self.classes.resolve(session.request.priority)
        wait_s = self._flow.wait_s(ahead)
        if not self._config.admission or wait_s <= self._ttft_limit_s(priority):
            return None
        reason = (
            f"predicted wait {wait_s:.1f} s behind {ahead} others, over {self._ttft(priority)} of class {priority.name}"
        )
        return Reject(reason, min(max(wait_s, 1.0), self._config.queue_timeout_s), code="predicted_ttft")

    def try_again(self, session: OpenSession, view: View, tried: Tried, now_s: float, retry_after_s: float) -> Decision:
        """Where a waiting session goes now, if anywhere. `tried`: of this pass; it is brought up to date."""
        request = session.request
        name, tokens = self.classes.resolve(request.priority).name, most_tokens(request)
        taking = *(each.take(request) for each in self.settings.limits.values()), len(request.failed_handoffs)
        why = tried.known(taking, tokens, name)
        if why is None:
            decision = self.decide(session, view, now_s)
            if not isinstance(decision, Queue):
                return decision
            tried.note(taking, tokens, name, why := decision)
        return self._refuse_waiting(session, why, now_s, retry_after_s) or why

    def _refuse_waiting(self, session: OpenSession, why: Queue, now_s: float, retry_after_s: float) -> Reject | None:
        """The refusal of a request that has waited for longer than its class allows for the first token.

        `why`: why it still cannot be placed. A session that is placed again is not refused so: it was admitted once.
        """
        if session.request.attempt > 1:
            return None
        priority = self.classes.resolve(session.request.priority)
        waited_s, limit_s = now_s - session.since_s, self._ttft_limit_s(priority)
        trusted = self._config.admission and session.knowledge.trusted and not why.unavailable
        if not trusted or waited_s <= limit_s:
            return None
        reason = f"waited {waited_s:.1f} s, over {self._ttft(priority)} of class {priority.name}: {why.reason}"
        return Reject(reason, retry_after_s, code="predicted_ttft")

    def _ttft(self, priority: PriorityClass) -> str:
        return f"{times(self._config.admission_slack)}the {priority.ttft_s:g} s TTFT"

    def _ttft_limit_s(self, priority: PriorityClass) -> float:
        return math.inf if priority.ttft_s is None else self._config.admission_slack * priority.ttft_s


def _whole(session: OpenSession) -> OpenSession:
    """This session, for one replica that does all."""
    modes = tuple(mode for mode in session.request.allowed if mode is not Mode.DISAGGREGATED)
    return replace(session, request=replace(session.request, allowed=modes))


def _lacks_room(decision: Decision) -> bool:
    """Whether other sessions are why a request has no place, or one where it would be late."""
    if isinstance(decision, Reject):
        return decision.code in ("predicted_ttft", "predicted_tpot")
    return isinstance(decision, Queue) and not decision.unavailable


def settings_of(config: BatonConfig) -> PlacementSettings:
    """What placement takes from the configuration."""
    placement = config.placement
    limits = {
        name: Limits(
            pool.min_prompt_tokens,
            pool.max_prompt_tokens,
            _names(pool.classes, placement.default_class),
            frozenset(pool.adapters),
        )
        for name, pool in config.pools.items()
        if pool.min_prompt_tokens or pool.max_prompt_tokens or pool.classes or pool.adapters
    }
    yielding = {name for name, each in config.classes.items() if each.yields}
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
        prompt_share=placement.prompt_share,
        slack=placement.admission_slack,
        relieves=placement.overcommit > 1,
        fetches=placement.fetch and config.channel.kind != "vllm",
        rebalances=placement.rebalance and placement.policy == "joint",
        own=frozenset(
            name for name, pool in config.pools.items() if pool.classes and yielding.issuperset(pool.classes)
        ),
    )


def _names(classes: Collection[str], default: str) -> frozenset[str]:
    """What requests of these classes ask for: "" is the default one."""
    return frozenset((*classes, "")) if default in classes else frozenset(classes)
