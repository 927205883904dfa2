"""The event loop: clients, allocators, replicas and links on one calendar.

The allocators are the production ones, and are called as the session manager calls them. `open` is called on arrival.
`answers` is called after every event that may have freed something, and at the next deadline. `prefill_done` and
`close` are called when a replica reaches that point. A session's life is as in ARCHITECTURE.md: decode allocates its
blocks and offers them, prefill fetches, computes and writes, the first token goes to the client at once, and decode
continues when the KV has landed. A session that an allocator moves stops at the end of a step, is placed again, and
continues when its KV has landed on the new owner. Not simulated: failures, cancelled requests, timeouts of sessions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from configs.schema import BatonConfig
from deployments.messages import Admit, Placement, Reject, SessionRequest
from deployments.policy.placement.split import ANY
from load_tests.simulator.calendar import Calendar
from load_tests.simulator.cluster import Node, Options, configuration, nodes
from load_tests.simulator.fetches import Fetches
from load_tests.simulator.ingress import Allocating, Ingress, Manager, Reports, ingresses
from load_tests.simulator.links import landed_s
from load_tests.simulator.metrics import Classes, Record, class_of
from load_tests.simulator.profiles import Cluster
from load_tests.simulator.session import Session
from load_tests.simulator.steps import Chunk
from load_tests.simulator.traces import Trace, TraceRequest
from load_tests.simulator.work import Work

KEPT_CALLS = 4
"""A replica keeps the KV of a session that it has given up for so many calls of the session manager."""
STUCK_S = 3600.0
"""If the simulation runs for so many simulated seconds after the last arrival, it hangs."""


class SimulationError(Exception):
    """The simulated cluster did something that a real cluster cannot do."""


@dataclass(frozen=True, slots=True)
class Result:
    """One record per request, in the order of arrival, and the replicas' counters."""

    records: tuple[Record, ...]
    preemptions: int
    moves: int
    blocks_in_use: int
    simulated_s: float
    events: int


class Simulation:
    """Runs a trace on a fleet, once."""

    def __init__(
        self,
        cluster: Cluster,
        trace: Trace,
        classes: Classes,
        options: Options,
        make_allocator: Callable[[BatonConfig, random.Random], Allocating],
    ) -> None:
        rng = random.Random(options.seed)
        self.nodes = nodes(cluster, trace.block_tokens, rng)
        config = configuration(cluster, trace.block_tokens, classes, options)
        calendar = self._calendar = Calendar()
        managers = [
            Manager(make_allocator(config, random.Random(rng.random())), calendar) for _ in range(options.allocators)
        ]
        self._ingresses = ingresses(managers, self._calendar, options, self._answered)
        self._fetches = Fetches(calendar, self.nodes, trace.block_tokens, self._touched)
        self._reports = Reports(
            tuple(self.nodes.values()), managers, calendar, options, self._give_up, self._fetches.copy
        )
        self._trace, self._classes, self._hop_s = trace, classes, cluster.hop_s
        self._begin_s, self._moves, self._call_s = options.snapshot_delay_s + 1e-3, 0, options.call_s
        self._sessions: dict[str, Session] = {}
        self._records: dict[str, Record] = {}

    def run(self) -> Result:
        """Run until every request is served or refused. Raises SimulationError when that never happens."""
        requests = self._trace.requests
        self._reports.begin(self._begin_s)
        self._calendar.at(self._begin_s + requests[0].at_s, self._arrive, 0)
        last_s = requests[-1].at_s + STUCK_S
        while len(self._records) < len(requests):
            self._calendar.step()
            if self._calendar.now_s > last_s:
                raise SimulationError(f"{len(requests) - len(self._records)} requests neither served nor refused")
        return Result(
            tuple(self._records[str(index)] for index in range(len(requests))),
            sum(node.replica.preemptions for node in self.nodes.values()),
            self._moves,
            sum(node.replica.memory.used for node in self.nodes.values()),
            self._calendar.now_s,
            self._calendar.acts,
        )

    # ---- clients and ingresses

    def _arrive(self, index: int) -> None:
        requests = self._trace.requests
        if index + 1 < len(requests):
            self._calendar.at(self._begin_s + requests[index + 1].at_s, self._arrive, index + 1)
        self._ingress(index).open(self._request(str(index), requests[index]))

    def _request(self, session_id: str, request: TraceRequest) -> SessionRequest:
        asked = (session_id, request.prompt_tokens, request.max_tokens, ANY)
        priority = class_of(self._classes, request.prompt_tokens).name
        return SessionRequest(*asked, hashes=request.hashes, priority=priority, client=request.client, chat=True)

    def _ingress(self, index: int) -> Ingress:
        return self._ingresses[index % len(self._ingresses)]

    def _answered(self, session_id: str, answer: Admit | Reject) -> None:
        request = self._trace.requests[int(session_id)]
        if (moved := self._sessions.get(session_id)) is not None:
            self._go_on(moved, answer)
        elif isinstance(answer, Admit):
            work = Work(session_id, 1, request.prompt_tokens, request.output_tokens, request.hashes + request.answered)
            owner = self.nodes[answer.placement.owner.replica_id]
            session = Session(request, self._ingress(int(session_id)), answer.placement, work, owner)
            self._sessions[session_id] = session
            self._place(session, answer.placement, work)
        else:
            self._refuse(session_id, answer)

    def _refuse(self, session_id: str, answer: Reject) -> None:
        asked, why = self._trace.requests[int(session_id)], answer.code or answer.reason
        self._end(session_id, Record(asked.at_s, asked.prompt_tokens, asked.output_tokens, refused=why))

    def _place(self, session: Session, placement: Placement, work: Work) -> None:
        """`work`: what is left of the session, as one replica alone would do it."""
        epoch, prompt = placement.epoch, work.prompt_tokens
        session.placement, session.answer = placement, work
        session.owner = self.nodes[placement.owner.replica_id]
        work.epoch, work.tpot_s = epoch, placement.tpot_s
        work.reserved = placement.reservation(placement.owner.replica_id, prompt)
        session.helper = session.prefill = None
        if placement.decode is not None and placement.prefill is not None:
            work.loads = True
            reserved = placement.reservation(placement.prefill.replica_id, prompt)
            hashes = work.hashes[: prompt // self._trace.block_tokens]
            session.prefill = Work(work.session_id, epoch, prompt, 1, hashes, reserved, keeps=True)
            session.helper = self.nodes[placement.prefill.replica_id]
        (session.prefill or work).fetch = placement.fetch
        self._calendar.at(self._calendar.now_s + self._hop_s, self._start, session)

    # ---- moves

    def _give_up(self, replica_id: str, session_id: str) -> None:
        """An allocator moves a session away from a replica."""
        node = self.nodes[replica_id]
        node.replica.give_up(session_id, self._calendar.now_s)
        self._touched(node)

    def _given_up(self, session: Session) -> None:
        """A session has stopped on its owner, and asks for another one."""
        work, request = session.answer, session.request
        session.moves += 1
        self._moves += 1
        session.answered_tokens = request.output_tokens - work.outputs + work.generated
        left = replace(
            self._request(work.session_id, request),
            prompt_tokens=work.prompt_tokens + work.generated,
            max_tokens=request.max_tokens - session.answered_tokens,
            answered_tokens=session.answered_tokens,
            hashes=work.hashes[: work.context // self._trace.block_tokens],
            attempt=session.moves + 1,
            moved_from=session.placement.owner.replica_id,
        )
        session.kept = work
        session.ingress.open(left)
        self._calendar.at(self._calendar.now_s + KEPT_CALLS * self._call_s, self._forget_kept, session, work)

    def _forget_kept(self, session: Session, work: Work) -> None:
        """A replica does not keep the KV of a session for which no other one has room at once."""
        if session.kept is work:
            session.owner.replica.release(work, self._calendar.now_s)
            session.kept = None
            self._touched(session.owner)

    def _go_on(self, session: Session, answer: Admit | Reject) -> None:
        """A session that moves has a new owner, or none."""
        work, source = session.answer, session.owner
        session.ingress.close(work.session_id, work.epoch, "moved", work.generated)
        if isinstance(answer, Reject):
            self._forget_kept(session, work)
            del self._sessions[work.session_id]
            self._refuse(work.session_id, answer)
            return
        rest = Work(work.session_id, 0, work.context, work.outputs - work.generated + 1, work.hashes)
        if not answer.placement.is_move:
            self._forget_kept(session, work)
        self._place(session, answer.placement, rest)
        session.kept = None
        if session.helper is source and answer.placement.is_move:
            session.prefill = work

    # ---- replicas

    def _start(self, session: Session) -> None:
        for session_id in session.placement.let_go:
            self._give_up(session.owner.replica.info.replica_id, session_id)
        self._submit(session.owner, session.answer)
        if session.helper is not None and session.prefill is not None:
            session.helper.replica.expect(session.prefill)
            session.helper.reporter.changed = True

    def _touched(self, node: Node) -> None:
        """A replica was given something. It has news, and its next boundary may be earlier."""
        node.reporter.changed = True
        boundary_s = node.replica.boundary_s
        if boundary_s is not None and boundary_s != node.scheduled_s:
            node.scheduled_s = boundary_s
            self._calendar.at(boundary_s, self._boundary, node)

    def _boundary(self, node: Node) -> None:
        now_s = self._calendar.now_s
        if node.replica.boundary_s != now_s:
            return  # it was moved to an earlier time
        happened = node.replica.boundary(now_s)
        node.scheduled_s = -1.0
        self._touched(node)
        for work in happened.offered:
            self._offered(self._sessions[work.session_id])
        for chunk in happened.chunks:
            self._send(self._sessions[chunk.work.session_id], chunk)
        for work in happened.first:
            self._first_token(self._sessions[work.session_id], work)
        for work in happened.given_up:
            self._given_up(self._sessions[work.session_id])
        for work in happened.ended:
            session = self._sessions[work.session_id]
            if work is session.answer:
                self._served(session, now_s + self._hop_s)

    def _offered(self, session: Session) -> None:
        """Decode has the blocks, so prefill may begin."""
        assert session.helper is not None
        assert session.prefill is not None
        now_s, work = self._calendar.now_s, session.prefill
        if work.is_given_up:  # its KV is there already
            self._send(session, Chunk(work, 0, work.context, now_s))
            self._calendar.at(max(session.landed_s, now_s), self._land, session)
            return
        self._submit(session.helper, work)

    def _submit(self, node: Node, work: Work) -> None:
        node.replica.submit(work, self._calendar.now_s)
        self._touched(node)

    def _send(self, session: Session, chunk: Chunk) -> None:
        """Send a chunk's KV, without the part that decode has in its cache."""
        sender, receiver = session.helper, session.owner
        assert sender is not None
        tokens = max(chunk.end - max(chunk.begin, session.answer.cached_tokens), 0)
        size = tokens * sender.kv_bytes_per_token
        there_s = landed_s(chunk, self._calendar.now_s, size, sender.layers, sender.out, receiver.into)
        session.landed_s = max(session.landed_s, there_s)

    def _first_token(self, session: Session, work: Work) -> None:
        now_s = self._calendar.now_s
        if session.first_s < 0.0:  # else it is computed again, after a preemption or a move
            session.first_s = now_s + self._hop_s
            session.cached_tokens = work.cached_tokens
        session.ingress.prefill_done(*session.key)
        if work is session.prefill:
            self._calendar.at(max(session.landed_s, now_s), self._land, session)

    def _land(self, session: Session) -> None:
        now_s = self._calendar.now_s
        assert session.helper is not None
        assert session.prefill is not None
        if session.prefill.is_given_up:
            session.ingress.prefill_done(*session.key)
        session.helper.replica.release(session.prefill, now_s)
        session.owner.replica.land(session.answer, now_s)
        self._touched(session.helper)
        self._touched(session.owner)
        if session.answer.outputs == 1:
            self._served(session, session.first_s)

    # ---- ends

    def _served(self, session: Session, last_s: float) -> None:
        request, tokens = session.request, session.request.output_tokens
        session_id, epoch = session.key
        self._end(session_id, session.record(self._begin_s, last_s, self._trace.block_tokens))
        del self._sessions[session_id]
        outcome, rest = "length" if tokens >= request.max_tokens else "stop", tokens - session.answered_tokens
        session.ingress.close(session_id, epoch, outcome, rest)

    def _end(self, session_id: str, record: Record) -> None:
        if session_id in self._records:
            raise SimulationError(f"session {session_id} ended twice")
        self._records[session_id] = record
