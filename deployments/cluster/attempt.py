"""One placement of a session: it asks for a place, begins its parts on the replicas, takes their outputs, and ends.

What is legal when is in its state machine (`session.py`); the attempt carries out what the machine says.
This file imports vllm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackEncoder

from deployments.cluster.answer import Answer
from deployments.cluster.batch import Batch
from deployments.cluster.engine_request import FINISH, Remainder, fetched, part, pushed, repeats
from deployments.cluster.notices import Notices
from deployments.cluster.port import Replicas
from deployments.cluster.refusal import refusal
from deployments.cluster.session import Deliver, Effect, EndPrefill, Fail, Over, PrefillOver, Session, StartDecode
from deployments.cluster.timings import Timings
from deployments.errors import HandoffFailed, ReplicaLost, RequestFault, SessionError
from deployments.host.tasks import OwnTasks
from deployments.host.waits import Stop, set_within
from deployments.manager import calls
from deployments.manager.calls import Manager
from deployments.messages import MANAGER_RETIRES, Handoff, Mode, Placement, Reject, ReplicaInfo, Role, SessionTask
from deployments.policy.admission.retry_budget import RETRY_BUDGET
from transfer.vllm.faults import FAULT


@dataclass(frozen=True, slots=True)
class Means:
    """What all attempts of one core work with.

    `handoff`: how the engines move a split session's KV cache. `block_size`: tokens per KV block. `running`: the
    attempts, by the request id that engines know them by.
    """

    manager: Manager
    notices: Notices
    replicas: Replicas
    tasks: OwnTasks
    batch: Batch
    handoff: Handoff
    block_size: int
    timings: Timings
    encoder: MsgpackEncoder = field(default_factory=MsgpackEncoder)
    running: dict[str, Attempt] = field(default_factory=dict)


class Attempt:
    """`over`: set when the state machine is over. `heard_s`: when the last output came, by the monotonic clock.

    `parts`: what ends each part that it has begun. `until_pulled`: the same, for what ends when decode has the KV
    cache, where decode pulls it. `notices`: what the session manager is being told of lost replicas.
    """

    def __init__(self, answer: Answer, left: Remainder, means: Means) -> None:
        self._answer, self._left, self._means = answer, left, means
        self.session = Session(answer.session_id, means.handoff)
        self.over = Stop()
        self.placement: Placement | None = None
        self._roles: dict[str, Role] = {}
        self.output_tokens = 0
        self.heard_s = time.monotonic()
        self._prefill_stats: PrefillStats | None = None
        self._parts: list[Callable[[], None]] = []
        self._until_pulled: list[Callable[[], None]] = []
        self._notices: list[asyncio.Task[None]] = []
        means.running[left.request.request_id] = self

    @property
    def number(self) -> int:
        return self._left.number

    @property
    def progressed(self) -> bool:
        """It gave the client more than a first token."""
        return self.output_tokens > 1

    # ---- place

    async def run(self) -> None:
        """See the attempt through: place it, begin its parts, and wait until it is over. Raises SessionError."""
        if not self.over.is_set():
            await self._place()
        if self.placement is not None and not self.session.is_over:
            self._begin(self.placement)
            await self.over.wait()

    async def _place(self) -> None:
        """Ask the manager. There is no placement when the attempt is over before the manager answers."""
        means, timings, answer = self._means, self._means.timings, self._answer
        request = answer.asks(self._left, means.handoff, means.block_size)
        give_up_s = time.monotonic() + timings.budget_wait_s
        while isinstance(decision := await self.over.unless_set(means.manager.ask(calls.Open(request))), Reject):
            if decision.code not in (RETRY_BUDGET, MANAGER_RETIRES) or time.monotonic() > give_up_s:
                answer.left(decision.allowance)
                raise refusal(decision)
            await set_within(self.over, decision.retry_after_s or timings.pause_s)
        if decision is not None:
            self.placement = decision.placement
            self._roles = {replica.replica_id: role for role, replica in self._replicas()}
            answer.left(decision.allowance)
            means.notices.prefix(decision.tell_tokens, answer.request, request.hashes, means.block_size)
            answer.placed(decision.placement, request.rule)

    # ---- begin

    def _begin(self, placement: Placement) -> None:
        """Where decode pulls, begin on prefill alone: its output starts decode.

        Otherwise begin on decode first, so that its blocks are offered as early as can be. Nothing waits for another.
        """
        self._apply(self.session.placed(placement.mode))
        if placement.mode is Mode.DISAGGREGATED and self._means.handoff is Handoff.PULLED:
            self._until_pulled.append(self._start(placement, Role.PREFILL, {"do_remote_decode": True}))
            return
        for role, replica, peer in (
            (Role.DECODE, placement.decode, placement.prefill),
            (Role.PREFILL, placement.prefill, placement.decode),
        ):
            if replica is not None:
                self._start(placement, role, pushed(placement, role, peer) if peer else None)

    def _start(self, placement: Placement, role: Role, transfer: dict[str, Any] | None) -> Callable[[], None]:
        """Begin one part. `transfer`: what its KV connector is told; none where nothing is handed over."""
        replica = placement.decode if role is Role.DECODE else placement.prefill
        assert replica is not None
        task = self._task(placement, replica, role, transfer)
        end = self._means.replicas.begin(replica, task, _Part(self, role, replica.replica_id))
        self._parts.append(end)
        return end

    def _task(
        self, placement: Placement, replica: ReplicaInfo, role: Role, transfer: dict[str, Any] | None
    ) -> SessionTask:
        left = self._left
        fetch = fetched(placement) if replica is placement.prefiller else None
        request = part(left.request, role, self._means.handoff, transfer, left.answered, placement.tpot_s, fetch)
        prompt_tokens = len(request.prompt_token_ids or ()) + len(left.answered)
        return SessionTask(
            session_id=placement.session_id,
            epoch=placement.epoch,
            replica_id=replica.replica_id,
            request_id=request.request_id,
            request=tuple(bytes(frame) for frame in self._means.encoder.encode(request)),
            timeout_s=placement.session_timeout_s,
            prompt_tokens=prompt_tokens,
            reservation=placement.reservation(replica.replica_id, prompt_tokens),
            movable=replica is placement.owner and not self._answer.continuation_rule,
            hands_over=role is Role.PREFILL and replica.replica_id == left.moved_from,
            traceparent=self._answer.traceparent,
            let_go=placement.let_go if replica is placement.owner else (),
        )

    def _start_decode(self, prefilled: EngineCoreOutput) -> None:
        """Prefill holds the KV cache, and its output says where. Decode has `handoff_timeout_s` to begin."""
        assert self.placement is not None
        self._prefill_stats = prefilled.prefill_stats
        if self._answer.meter is not None:
            self._answer.meter.prefilled()
        self._start(self.placement, Role.DECODE, prefilled.kv_transfer_params)
        timeout_s = self.placement.handoff_timeout_s
        late = HandoffFailed(f"decode has not begun within {timeout_s:g} s of the prefill")
        limit = asyncio.get_running_loop().call_later(timeout_s, lambda: self._apply(self.session.lost(late)))
        for ends in (self._parts, self._until_pulled):
            ends.append(limit.cancel)

    # ---- take

    def take(self, replica_id: str, output: EngineCoreOutput, stamp_s: float = 0.0) -> None:
        """Take an engine's output, of `stamp_s` by its clock. The caller flushes the batch after all of one message."""
        role = self._roles.get(replica_id)
        if role is None:
            return
        self.heard_s = time.monotonic()
        if output.finish_reason is None and self.session.goes_on(role):
            self.output_tokens += len(output.new_token_ids)
            self._answer.give(output, finish=False)
            return
        assert self.placement is not None
        if self._answer.sent and self.number > 1:
            output.prefill_stats = None  # its prompt holds tokens that the client was given as an answer
        elif role is Role.DECODE and self.placement.prefill is not None and output.prefill_stats is not None:
            output.prefill_stats = self._prefill_stats  # prefill's counts are the request's
        self._answer.took(role, output, stamp_s)
        if role is Role.PREFILL and output.finish_reason is FinishReason.LENGTH and self._is_repeating(output):
            output.finish_reason, output.stop_reason = FinishReason.REPETITION, "repetition_detected"
        finish = None if output.finish_reason is None else FINISH[output.finish_reason]
        fault = (output.trace_headers or {}).get(FAULT, "")
        self._carry_out(self.session.output(role, output, finish, fault))

    def _is_repeating(self, prefilled: EngineCoreOutput) -> bool:
        """Whether the answer is over with prefill's token. Decode does not look at it. Pulled KV comes without one."""
        tokens = [*self._answer.sent, *prefilled.new_token_ids]
        return self._means.handoff is Handoff.PUSHED and repeats(self._left.request, tokens)

    def running_on(self) -> list[tuple[Role, ReplicaInfo]]:
        """The replicas that it runs on; none when it is over."""
        return [] if self.session.is_over else list(self._replicas())

    def _replicas(self) -> Iterator[tuple[Role, ReplicaInfo]]:
        if self.placement is not None:
            for role, replica in ((Role.DECODE, self.placement.decode), (Role.PREFILL, self.placement.prefill)):
                if replica is not None:
                    yield role, replica

    # ---- over

    def replica_lost(self, role: Role, detail: str, notice: asyncio.Task[None]) -> None:
        """A replica does not finish its part. `notice`: the task that tells the manager."""
        self._notices.append(notice)
        self._apply(self.session.replica_lost(role, detail))

    def cancel(self) -> None:
        self._apply(self.session.cancelled())

    def fail(self, error: SessionError) -> None:
        self._apply(self.session.failed(error))

    def part_ended(self, role: Role, outcome: str) -> None:
        """A replica has ended its part. What it gave before that has been taken."""
        self._apply(self.session.reported(role, outcome))

    def part_lost(self, role: Role, replica_id: str, error: ReplicaLost) -> None:
        """A replica cannot be reached, has gone or has failed."""
        self.replica_lost(role, str(error), self._means.notices.replica_lost(replica_id, error))

    async def end(self) -> None:
        """End what is still open of a lost attempt, and release what was reserved for it."""
        self.end_parts()
        await asyncio.gather(*self._notices, return_exceptions=True)  # then nothing is placed on the lost replicas
        self.release()

    def end_parts(self) -> None:
        """End what is still open on replicas; idempotent."""
        for end in self._parts:
            end()
        self._means.running.pop(self._left.request.request_id, None)

    def release(self) -> asyncio.Task[None]:
        """Release what was reserved: tell the manager, once. Raises IllegalEvent while the attempt is not over."""
        session, notices = self.session, self._means.notices
        session.closed()
        if self.placement is None:
            told = notices.withdraw(session.session_id, session.outcome)
        else:
            told = notices.close(self.placement, session.outcome, self.output_tokens, session.owner_ended)
        return self._means.tasks.own(told, "close")

    # ---- what the state machine says

    def _apply(self, effects: list[Effect]) -> None:
        self._carry_out(effects)
        self._means.batch.flush()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(output, finish):
                    self.output_tokens += len(output.new_token_ids)
                    self._answer.give(output, finish)
                case PrefillOver():
                    assert self.placement is not None
                    self._means.notices.prefill_done(self.placement)
                case StartDecode(output):
                    self._start_decode(output)
                case EndPrefill():
                    for end in self._until_pulled:
                        end()
                case Fail(error):
                    self._answer.fail(error)
                case Over():
                    self.over.set()


class _Part:
    """One part of an attempt, as `link.ingress_side` tells of it."""

    __slots__ = ("_attempt", "_replica_id", "_role")

    def __init__(self, attempt: Attempt, role: Role, replica_id: str) -> None:
        self._attempt, self._role, self._replica_id = attempt, role, replica_id

    def ended(self, outcome: str) -> None:
        self._attempt.part_ended(self._role, outcome)

    def lost(self, error: ReplicaLost) -> None:
        self._attempt.part_lost(self._role, self._replica_id, error)

    def refused(self, error: RequestFault) -> None:
        self._attempt.fail(error)
