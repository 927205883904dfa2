"""What a replica tells the session manager, when it does so, and how it acts on the answer."""

from __future__ import annotations

import asyncio
import logging
import time

from configs.schema import PlacementConfig
from deployments.engine.protocol import Engine, Identity
from deployments.errors import Unavailable
from deployments.host.waits import set_within
from deployments.manager.calls import Manager, Report
from deployments.messages import ReplicaInfo, ReplicaSnapshot, ReportAnswer
from deployments.replica.handing_on import HandingOn
from deployments.replica.lifecycle import Lifecycle
from deployments.replica.parts import Parts
from deployments.replica.peers import Introductions
from deployments.replica.pins import Pins
from deployments.replica.readings import Readings
from deployments.replica.timings import Timings

logger = logging.getLogger("baton.replica")


class Reporter:
    """Reports what has changed, at most once per interval, and reports once per heartbeat when nothing has.

    `info`: set it once the engine is loaded; until then reports say that the replica is loading.
    """

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        manager: Manager,
        config: PlacementConfig,
        timings: Timings,
        parts: Parts,
        life: Lifecycle,
        readings: Readings,
        peers: Introductions,
        pins: Pins,
        handing_on: HandingOn,
    ) -> None:
        self.info: ReplicaInfo | None = None
        self._identity, self._engine, self._manager = identity, engine, manager
        self._config, self._timings = config, timings
        self._parts, self._life, self._readings, self._peers, self._pins = parts, life, readings, peers, pins
        self._handing_on = handing_on
        self._version = time.time_ns()  # so that versions grow over restarts too
        self._changed, self._urgent = asyncio.Event(), asyncio.Event()
        self._interval_s = config.snapshot_interval_s
        self._resync = False

    def tell(self, urgently: bool = False) -> None:
        """Report a change at the next interval.

        `urgently`: do so even if the manager asks for longer intervals.
        """
        self._changed.set()
        if urgently:
            self._urgent.set()

    async def report_loop(self) -> None:
        """Report without end. A large fleet's manager asks for longer intervals; urgent news does not wait for them."""
        while True:
            self._changed.clear()  # before the snapshot, so that what changes after it is news
            self._urgent.clear()
            if self._life.serves and not self._parts.open:
                await self._readings.settle()
            await self._report(self._snapshot())
            await self._pause()

    async def _report(self, snapshot: ReplicaSnapshot) -> None:
        try:
            async with asyncio.timeout(self._timings.report_timeout_s):
                self._heed(await self._manager.ask(Report(snapshot)), snapshot)
        except (TimeoutError, Unavailable) as error:
            self._resync = True
            if snapshot.info is not None:
                self._life.unheard(snapshot.phase)
            logger.warning("the session manager did not take a snapshot: %r", error)

    def _heed(self, answer: ReportAnswer, snapshot: ReplicaSnapshot) -> None:
        self._resync, self._interval_s = answer.resync, answer.interval_s
        if snapshot.info is not None:
            self._life.heard(snapshot.phase, answer.hold)
        if answer.resync:
            self.tell(urgently=True)
        if answer.peers is not None:
            self._peers.learn(answer.peers)
        self._pins.learn(answer)
        if answer.pins is not None:
            self.tell(urgently=True)
        self._handing_on.take(answer.bring)
        if answer.move:
            self._parts.move_out(answer.move)
        if answer.drain is not None and self._life.park(answer.drain):
            self.tell(urgently=True)

    async def _pause(self) -> None:
        """Wait until the next report is due."""
        interval_s = self._config.snapshot_interval_s
        longer_s = self._interval_s - interval_s
        await asyncio.sleep(interval_s)
        await set_within(self._urgent, longer_s)
        # A replica that is held back asks again at once, but only a manager that answers.
        if self._resync or not self._life.is_held:
            await set_within(self._changed, self._timings.heartbeat_s - max(0.0, longer_s))

    def _snapshot(self) -> ReplicaSnapshot:
        self._version += 1
        parts = tuple(self._parts.open.values())
        load = self._readings.load if parts else self._readings.idle_load
        may_move = self._config.overcommit > 1 or self._config.rebalance
        return ReplicaSnapshot(
            replica_id=self._identity.replica_id,
            version=self._version,
            phase=self._life.phase,
            info=self.info,
            pool=self._identity.pool,
            used_blocks=load.used_blocks,
            running=load.running,
            waiting=load.waiting,
            backlog_tokens=sum(part.task.prompt_tokens for part in parts if not part.started),
            sessions=tuple(part.task.session_id for part in parts),
            reservations=tuple(part.reservation for part in parts),
            counters=self._readings.counters | {"moved_out": self._parts.moved_out},
            peers_version=self._peers.version,
            running_tokens=load.running_tokens,
            finished=self._parts.tell(),
            finished_version=self._parts.ended_version,
            steps=self._readings.take_steps(),
            cached_blocks=max(0, load.cached_blocks - load.used_blocks),  # most blocks in use are cached ones
            cache=None if self.info is None else self._engine.cache_change(whole=self._resync),
            held_tokens=tuple(part.held_tokens for part in parts) if may_move else (),
            movable=frozenset(part.task.session_id for part in parts if may_move and part.task.movable),
            is_starting=self._life.is_starting,
            adapters=self._engine.adapters(),
            pinned=load.pinned,
            pins_version=self._pins.list.version,
            pins=self._pins.list if self._resync else None,
        )
