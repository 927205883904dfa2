"""Ingresses, and the session managers that decide for them by the production allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from deployments.messages import Admit, Reject, ReplicaSnapshot, SessionRequest
from deployments.policy.admission.waiting_room import WaitingRoom
from deployments.policy.spread import Copy
from load_tests.simulator.calendar import Calendar
from load_tests.simulator.cluster import Node, Options

GROUPS = 10
"""Replicas do not all report at once. A tenth of them reports at each tenth of the interval."""
TIMER_S = 1e-6
"""A timer fires this much after its deadline, so that the deadline has passed."""


Answered = Callable[[str, Admit | Reject], None]
"""Called with the decision on a session."""


CopyTo = Callable[[str, Copy], None]
"""Called with a replica and the prefix that it is to fetch."""


Move = Callable[[str, str], None]
"""Called with a replica and a session that it gives up."""


class Allocating(Protocol):
    """The methods of an allocator that the session manager and the simulator call."""

    @property
    def room(self) -> WaitingRoom: ...

    def open(self, request: SessionRequest, now_s: float) -> Admit | Reject | None: ...
    def answers(self, now_s: float) -> Sequence[tuple[str, Admit | Reject]]: ...
    def prefill_done(self, session_id: str, epoch: int, now_s: float) -> object: ...
    def close(
        self,
        session_id: str,
        epoch: int,
        outcome: str,
        now_s: float,
        output_tokens: int | None = None,
        ended: bool = False,
    ) -> object: ...
    def report(self, snapshot: ReplicaSnapshot, now_s: float) -> object: ...
    def sessions_to_move(self, snapshot: ReplicaSnapshot, now_s: float) -> Sequence[str]: ...
    def copy_to(self, snapshot: ReplicaSnapshot, now_s: float) -> Copy | None: ...
    def sweep(self, now_s: float) -> object: ...


class Manager:
    """An allocator, and the callers that wait for its answers. Both are checked after every event."""

    def __init__(self, allocator: Allocating, calendar: Calendar) -> None:
        self.allocator = allocator
        self._calendar = calendar
        self._waiting: dict[str, Answered] = {}
        self._deadline_s = float("inf")

    def open(self, request: SessionRequest, answered: Answered) -> None:
        """Ask for a placement. `answered` is called once, now or later."""
        answer = self.allocator.open(request, self._calendar.now_s)
        if answer is None:
            self._waiting[request.session_id] = answered
        else:
            answered(request.session_id, answer)
        self._poll()

    def prefill_done(self, session_id: str, epoch: int) -> None:
        self.allocator.prefill_done(session_id, epoch, self._calendar.now_s)
        self._poll()

    def close(self, session_id: str, epoch: int, outcome: str, output_tokens: int) -> None:
        self.allocator.close(session_id, epoch, outcome, self._calendar.now_s, output_tokens, ended=True)
        self._poll()

    def report(self, snapshots: Iterable[ReplicaSnapshot], move: Move, copy: CopyTo) -> None:
        """Take these snapshots. `move`: called with each session that a replica gives up; `copy`: with each copy."""
        for snapshot in snapshots:
            self.allocator.report(snapshot, self._calendar.now_s)
            for session_id in self.allocator.sessions_to_move(snapshot, self._calendar.now_s):
                move(snapshot.replica_id, session_id)
            if (hot := self.allocator.copy_to(snapshot, self._calendar.now_s)) is not None:
                copy(snapshot.replica_id, hot)
        self.allocator.sweep(self._calendar.now_s)
        self._poll()

    def _poll(self) -> None:
        """Pass answers to the callers that wait, and schedule a check at the next deadline among them."""
        if not self._waiting:
            return
        now_s = self._calendar.now_s
        for session_id, answer in self.allocator.answers(now_s):
            self._waiting.pop(session_id)(session_id, answer)
        deadline_s = self.allocator.room.next_deadline_s()
        if deadline_s is not None and deadline_s < self._deadline_s:
            self._deadline_s = max(deadline_s, now_s)
            self._calendar.at(self._deadline_s + TIMER_S, self._late, self._deadline_s)

    def _late(self, deadline_s: float) -> None:
        if self._deadline_s <= deadline_s:
            self._deadline_s = float("inf")
        self._poll()


class Ingress:
    """Calls its manager and gets the answers. Each way takes `call_s`."""

    def __init__(self, manager: Manager, calendar: Calendar, call_s: float, answered: Answered) -> None:
        self._manager, self._calendar, self._call_s, self._answered = manager, calendar, call_s, answered

    def open(self, request: SessionRequest) -> None:
        self._after(self._manager.open, request, self._decided)

    def prefill_done(self, session_id: str, epoch: int) -> None:
        self._after(self._manager.prefill_done, session_id, epoch)

    def close(self, session_id: str, epoch: int, outcome: str, output_tokens: int) -> None:
        self._after(self._manager.close, session_id, epoch, outcome, output_tokens)

    def _decided(self, session_id: str, answer: Admit | Reject) -> None:
        self._after(self._answered, session_id, answer)

    def _after(self, act: Callable[..., None], *arguments: object) -> None:
        if self._call_s:
            self._calendar.at(self._calendar.now_s + self._call_s, act, *arguments)
        else:
            act(*arguments)


def ingresses(managers: Sequence[Manager], calendar: Calendar, options: Options, answered: Answered) -> list[Ingress]:
    """The ingresses, each with its manager.

    Their calls take from half to one and a half times `call_s`, so that some calls overtake others.
    """
    number = options.ingresses
    return [
        Ingress(managers[index % len(managers)], calendar, (0.5 + (index + 0.5) / number) * options.call_s, answered)
        for index in range(number)
    ]


class Reports:
    """Makes every replica with news report, at most once per interval, and tells the managers after the delay."""

    def __init__(
        self,
        nodes: Sequence[Node],
        managers: Sequence[Manager],
        calendar: Calendar,
        options: Options,
        move: Move,
        copy: CopyTo,
    ) -> None:
        self._groups = [list(nodes[group::GROUPS]) for group in range(GROUPS)]
        self._managers, self._calendar, self._options = managers, calendar, options
        self._move, self._copy = move, copy

    def begin(self, at_s: float) -> None:
        """All replicas report once, and the managers know it at once. From `at_s` on the replicas report in turn."""
        self._deliver([node.reporter.snapshot(0.0) for group in self._groups for node in group])
        for number, group in enumerate(self._groups):
            self._calendar.at(at_s + number / GROUPS * self._options.snapshot_interval_s, self._tick, group)

    def join(self, node: Node) -> None:
        """A new replica reports now, and in turn from now on."""
        min(self._groups, key=len).append(node)
        self.now(node)

    def now(self, node: Node) -> None:
        """A replica reports out of its turn."""
        self._deliver([node.reporter.snapshot(self._calendar.now_s)])

    def leave(self, node: Node) -> None:
        """A replica reports no more."""
        for group in self._groups:
            if node in group:
                group.remove(node)

    def _tick(self, group: Sequence[Node]) -> None:
        now_s, options = self._calendar.now_s, self._options
        self._calendar.at(now_s + options.snapshot_interval_s, self._tick, group)
        quiet_since_s = now_s - options.quiet_s
        snapshots = [
            node.reporter.snapshot(now_s)
            for node in group
            if node.reporter.changed or node.reporter.reported_s <= quiet_since_s
        ]
        if snapshots and options.snapshot_delay_s:
            self._calendar.at(now_s + options.snapshot_delay_s, self._deliver, snapshots)
        elif snapshots:
            self._deliver(snapshots)

    def _deliver(self, snapshots: Sequence[ReplicaSnapshot]) -> None:
        for manager in self._managers:
            manager.report(snapshots, self._move, self._copy)
