"""A simulation whose pools grow and shrink while it runs, as a scaler says.

A new replica serves after its start time, which is paid for. A replica that leaves takes nothing new; its sessions may
end for three quarters of the drain time, then they move; it is gone, and paid for, until nothing runs on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from configs.schema import BatonConfig
from deployments.messages import Phase
from deployments.policy.allocator import Allocator
from load_tests.simulator.cluster import Node, Options, deployment_of, new_node
from load_tests.simulator.metrics import Classes, Record
from load_tests.simulator.profiles import Cluster, Pool
from load_tests.simulator.simulation import Result, Simulation
from load_tests.simulator.traces import Trace, TraceRequest

RUN_SHARE = 0.75
"""The share of the drain time in which sessions may end by themselves, as in `deployments/replica/drain.py`."""
LOOK_S = 1.0
START_SIGMA = 0.1


@dataclass(frozen=True, slots=True)
class Elasticity:
    """How a fleet changes. `bounds`: least and most replicas by deployment. `start_s`: the median time of a start.

    `count_from_s`: costs and reversals count from then on. `stuck`: by deployment, the replicas beyond which no start
    ever ends, because the cluster has no room.
    """

    interval_s: float = 5.0
    start_s: float = 60.0
    drain_s: float = 30.0
    count_from_s: float = 0.0
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stuck: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Start:
    """A start in flight."""

    begun_s: float
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class Members:
    """The replicas of one pool. `paid_s`: of those that are gone. `begun_s`: since when each of the others is paid."""

    pool: Pool
    target: int
    nodes: list[Node] = field(default_factory=list)
    starting: list[Start] = field(default_factory=list)
    leaving: list[Node] = field(default_factory=list)
    begun_s: dict[str, float] = field(default_factory=dict)
    made: int = 0
    paid_s: float = 0.0
    targets: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Watched:
    """What a scaler may read. `arrived`, `ended`: since the last call."""

    at_s: float
    allocator: Allocator
    pools: Mapping[str, Members]
    arrived: Sequence[TraceRequest]
    ended: Sequence[Record]


class Scaler(Protocol):
    """Says how many replicas each deployment shall have. It is called every interval."""

    def targets(self, watched: Watched) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class Elastic:
    """`result`, and what the replicas cost until the last arrival. `reversals`: changes of direction of any target.

    `length_s`: the time that counts, from `count_from_s` to the last arrival. `sizes`: by deployment, the times of
    changes and the target from then on.
    """

    result: Result
    replica_hours: float
    reversals: int
    length_s: float
    sizes: Mapping[str, Sequence[tuple[float, int]]]


class ElasticSimulation(Simulation):
    """Runs a trace on a fleet that a scaler sizes. The cluster's replicas are those at the beginning."""

    def __init__(
        self,
        cluster: Cluster,
        trace: Trace,
        classes: Classes,
        options: Options,
        elasticity: Elasticity,
        make_scaler: Callable[[BatonConfig], Scaler],
    ) -> None:
        made: list[tuple[BatonConfig, Allocator]] = []

        def make(config: BatonConfig, rng: random.Random) -> Allocator:
            made.append((config, Allocator(config, rng)))
            return made[-1][1]

        super().__init__(cluster, trace, classes, options, make)
        config, self._allocator = made[0]
        self._cluster, self._elasticity, self._scaler = cluster, elasticity, make_scaler(config)
        self._rng = random.Random(options.seed + 1)
        self._arrived: list[TraceRequest] = []
        self._ended: list[Record] = []
        self._members = {deployment_of(pool): Members(pool, pool.replicas) for pool in cluster.pools}
        for node in self.nodes.values():
            members = self._members[node.replica.info.pool]
            members.nodes.append(node)
            members.made += 1
            members.begun_s[node.replica.info.replica_id] = self._begin_s

    def run_elastic(self) -> Elastic:
        """Run until every request is served or refused."""
        self._calendar.at(self._begin_s + self._elasticity.interval_s, self._scale)
        result = self.run()
        length_s = self._trace.requests[-1].at_s - self._elasticity.count_from_s
        end_s = self._calendar.now_s
        paid_s = sum(
            members.paid_s
            + sum(self._paid_s(begun_s, end_s) for begun_s in members.begun_s.values())
            + sum(self._paid_s(start.begun_s, end_s) for start in members.starting)
            for members in self._members.values()
        )
        sizes = {name: tuple(members.targets) for name, members in self._members.items()}
        turns = sum(self._turns(name) for name in sizes)
        return Elastic(result, paid_s / 3600, turns, length_s, sizes)

    # ---- what the scaler sees

    def _arrive(self, index: int) -> None:
        self._arrived.append(self._trace.requests[index])
        super()._arrive(index)

    def _end(self, session_id: str, record: Record) -> None:
        self._ended.append(record)
        super()._end(session_id, record)

    def _scale(self) -> None:
        now_s = self._calendar.now_s
        self._calendar.at(now_s + self._elasticity.interval_s, self._scale)
        watched = Watched(now_s, self._allocator, self._members, self._arrived, self._ended)
        targets = self._scaler.targets(watched)
        self._arrived, self._ended = [], []
        for name, members in self._members.items():
            least, most = self._elasticity.bounds.get(name, (0, 1 << 30))
            target = min(max(targets.get(name, members.target), least), most)
            if target != members.target:
                members.targets.append((now_s - self._begin_s, target))
                members.target = target
            self._resize(name, members)

    # ---- replicas that come and go

    def _resize(self, name: str, members: Members) -> None:
        surplus = len(members.nodes) + len(members.starting) - members.target
        for _ in range(-surplus):
            self._begin_start(name, members)
        while surplus > 0 and members.starting:
            self._cancel(members, members.starting.pop())
            surplus -= 1
        by_load = sorted(members.nodes, key=lambda node: len(node.replica.sessions))
        for node in by_load[: max(0, surplus)]:
            self._drain(members, node)

    def _begin_start(self, name: str, members: Members) -> None:
        start = Start(self._calendar.now_s)
        members.starting.append(start)
        if len(members.nodes) + len(members.starting) <= self._elasticity.stuck.get(name, 1 << 30):
            takes_s = self._elasticity.start_s * self._rng.lognormvariate(0.0, START_SIGMA)
            self._calendar.at(start.begun_s + takes_s, self._started, members, start)

    def _cancel(self, members: Members, start: Start) -> None:
        start.is_cancelled = True
        members.paid_s += self._paid_s(start.begun_s, self._calendar.now_s)

    def _started(self, members: Members, start: Start) -> None:
        if start.is_cancelled:
            return
        members.starting.remove(start)
        node = new_node(self._cluster, members.pool, members.made, self._trace.block_tokens, self._rng)
        members.made += 1
        members.nodes.append(node)
        members.begun_s[node.replica.info.replica_id] = start.begun_s
        self.nodes[node.replica.info.replica_id] = node
        self._fetches.join(node)
        self._reports.join(node)

    def _drain(self, members: Members, node: Node) -> None:
        members.nodes.remove(node)
        members.leaving.append(node)
        node.reporter.phase = Phase.DRAINING
        self._reports.now(node)
        self._calendar.at(self._calendar.now_s + LOOK_S, self._look, members, node, self._calendar.now_s, False)

    def _look(self, members: Members, node: Node, since_s: float, was_quiet: bool) -> None:
        """Let go a replica on which nothing runs in two looks; late in the drain, move what runs."""
        now_s, replica = self._calendar.now_s, node.replica
        is_quiet = not replica.sessions
        if is_quiet and was_quiet:
            replica_id = replica.info.replica_id
            members.leaving.remove(node)
            members.paid_s += self._paid_s(members.begun_s.pop(replica_id), now_s)
            self._reports.leave(node)
            self._allocator.lost(replica_id, now_s, gone=True)
            return
        if now_s - since_s > RUN_SHARE * self._elasticity.drain_s:
            for session_id in tuple(replica.sessions):
                self._give_up(replica.info.replica_id, session_id)
        self._calendar.at(now_s + LOOK_S, self._look, members, node, since_s, is_quiet)

    def _paid_s(self, begun_s: float, end_s: float) -> float:
        """The part of a time that counts: not before `count_from_s`, and not after the last arrival."""
        from_s, until_s = self._elasticity.count_from_s, self._trace.requests[-1].at_s
        return max(0.0, min(end_s - self._begin_s, until_s) - max(begun_s - self._begin_s, from_s))

    def _turns(self, name: str) -> int:
        """How often the target of a pool changed its direction."""
        members, from_s = self._members[name], self._elasticity.count_from_s
        early = [members.pool.replicas, *(size for at_s, size in members.targets if at_s < from_s)]
        sizes = [early[-1], *(size for at_s, size in members.targets if at_s >= from_s)]
        steps = [after - before for before, after in pairwise(sizes) if after != before]
        return sum((before > 0) != (after > 0) for before, after in pairwise(steps))
