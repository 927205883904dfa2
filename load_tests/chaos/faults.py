"""Faults of the mock cluster, drawn at random.

Each happens at a named point of a session's life, and is mended after a while.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

from deployments.errors import ReplicaLost
from load_tests.chaos.messages import MESSAGE_FAULTS, disturbed
from load_tests.chaos.points import POINTS
from load_tests.harness.control_plane import REPLICAS, GatedEngine, InProcess

POINT_S = 0.5
"""The longest that a fault waits for a session to reach its point. After that it happens anywhere."""

OFTEN = ("kill", "break", "stop", "slow", "fill", "refuse", *MESSAGE_FAULTS)
SELDOM = ("manager", "ingress")
"""Faults that concern every session. One fault in `SELDOM_EACH` is one of them."""
SELDOM_EACH = 50

KINDS = (*OFTEN, *SELDOM)


class Faults:
    """Causes one fault after the other. `pause_s`: the longest pause between two. `kinds`: those that may be drawn.

    `deaths`: for each death of a decode engine, when it began, when it was over, and the sessions that it had then.
    """

    def __init__(self, cluster: InProcess, draw: random.Random, pause_s: float, kinds: Sequence[str] = KINDS) -> None:
        self.cluster, self.draw, self._pause_s = cluster, draw, pause_s
        self._often = [kind for kind in OFTEN if kind in kinds]
        self._seldom = [kind for kind in SELDOM if kind in kinds]
        self.counts, self.points = Counter[str](), Counter[str]()
        self.deaths: list[tuple[float, float, list[str]]] = []
        self._lives = Counter[str]()
        self._dying: set[str] = set()
        self._disturbed: set[str] = set()
        self._manager_is_away = False
        self._does: dict[str, Callable[[str], Awaitable[None]]] = {
            "kill": self._kill,
            "break": self._break,
            "stop": self._stop,
            "slow": self._slow,
            "fill": self._fill,
            "refuse": self._refuse,
            "manager": self._restart_manager,
            "ingress": self._kill_ingress,
            **{kind: functools.partial(self._disturb, kind) for kind in MESSAGE_FAULTS},
        }

    async def run(self, faults: int, streams: int = 1) -> None:
        """Causes `faults` faults, `streams` at a time."""
        async with asyncio.TaskGroup() as group:
            for stream in range(streams):
                group.create_task(self._run(len(range(stream, faults, streams))))

    async def _run(self, faults: int) -> None:
        for _ in range(faults):
            kind, point = self._kind(), self.draw.choice(POINTS)
            replica_id = await self.cluster.points.next(point, POINT_S)
            self.counts[kind] += 1
            self.points[point if replica_id else "anywhere"] += 1
            await self._does[kind](self._living(replica_id))
            await asyncio.sleep(self.draw.random() * self._pause_s)

    def _kind(self) -> str:
        seldom = self._seldom and self.draw.randrange(SELDOM_EACH) == 0
        return self.draw.choice(self._seldom if seldom else self._often)

    def _living(self, replica_id: str) -> str:
        """The replica, or another one while it is being replaced."""
        living = [each for each in self.cluster.replicas if each not in self._dying]
        return replica_id if replica_id in living else self.draw.choice(living)

    def _engine(self, replica_id: str) -> GatedEngine:
        return self.cluster.engines[replica_id]

    async def _some_time(self, longest_s: float) -> None:
        await asyncio.sleep(self.draw.random() * longest_s)

    async def _kill(self, replica_id: str) -> None:
        """An engine dies. After a moment another replica takes its place, as under Serve."""
        self._dying.add(replica_id)
        pool, clock = replica_id.rpartition("-")[0], asyncio.get_running_loop().time
        placed = await self.cluster.placements()
        sessions, began_s = [name for name, promise in placed.items() if promise["decode"] == replica_id], clock()
        await self.cluster.kill(replica_id)
        if pool != "prefill":
            self.deaths.append((began_s, clock(), sessions))
        await self._some_time(0.05)
        await self.cluster.bury(replica_id)
        self._lives[pool] += 1
        another = f"{pool}-life{self._lives[pool]}"
        self._dying.add(another)  # it cannot be killed before it runs
        await self.cluster.start(another)
        self._dying -= {replica_id, another}

    async def _break(self, replica_id: str) -> None:
        """KV writes fail for a while."""
        plane = self.cluster.planes[replica_id]
        plane.broken = True
        await self._some_time(0.05)
        plane.broken = False

    async def _stop(self, replica_id: str) -> None:
        """An engine computes nothing for a while, and its writes stay under way: a process stopped and continued."""
        engine, plane = self._engine(replica_id), self.cluster.planes[replica_id]
        engine.go.clear()
        plane.shut = True
        await self._some_time(0.2)
        plane.shut = False
        engine.go.set()

    async def _slow(self, replica_id: str) -> None:
        """An engine's steps take longer for a while."""
        engine = self._engine(replica_id)
        engine.slower_s = 0.02 + self.draw.random() * 0.1
        await self._some_time(0.3)
        engine.slower_s = 0.0

    async def _fill(self, replica_id: str) -> None:
        """An engine has no free blocks for a while: it preempts, and takes nothing new."""
        empty = self._engine(replica_id).fill()
        await self._some_time(0.1)
        empty()

    async def _refuse(self, replica_id: str) -> None:
        """A pool's calls fail at once for a while."""
        pool = self.cluster.pools[REPLICAS.get(replica_id) or replica_id.rpartition("-")[0]]
        pool.error = ReplicaLost("it refuses")
        await self._some_time(0.05)
        pool.error = None

    async def _disturb(self, kind: str, replica_id: str) -> None:
        """The messages of a worker to its peers suffer a fault for a while. A worker has one such fault at a time."""
        if replica_id in self._disturbed:
            return
        self._disturbed.add(replica_id)
        with disturbed(self._engine(replica_id), kind, self.draw, delay_s=0.1):
            await self._some_time(0.1)
        self._disturbed.remove(replica_id)

    async def _restart_manager(self, _: str) -> None:
        if self._manager_is_away:
            return
        self._manager_is_away = True
        self.cluster.lose_manager()
        await self._some_time(0.3)
        self.cluster.restart_manager()
        self._manager_is_away = False

    async def _kill_ingress(self, _: str) -> None:
        self.cluster.kill_ingress()

    def pauses_s(self) -> list[float]:
        """The longest gap between two tokens around each death, of each session that was decoding there and went on."""
        pauses = []
        for began_s, dead_s, sessions in self.deaths:
            for request_id in sessions:
                times_s = self.cluster.answers[request_id].times_s
                gaps = [(a, b) for a, b in pairwise(times_s) if a <= dead_s and b > began_s]
                pauses += [max(b - a for a, b in gaps)] if gaps else []
        return pauses
