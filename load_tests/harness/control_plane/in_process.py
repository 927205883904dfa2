"""A whole control plane in one process, without Ray. Every part is the real one except the engines, which are mocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any

from configs.schema import BatonConfig, role_of
from deployments.cluster.core import ClusterCore
from deployments.cluster.recovery import Limits
from deployments.cluster.request_context import RequestContext
from deployments.cluster.timeline import Timelines
from deployments.cluster.timings import DEFAULT_TIMINGS, Timings
from deployments.engine.protocol import EngineError, Identity
from deployments.manager.calls import Ready, Status
from deployments.manager.manager import LISTEN_S, SessionManager
from deployments.manager.stand_in import StandIn
from deployments.manager.timings import TIMINGS
from deployments.manager.timings import Timings as ManagerTimings
from deployments.messages import Role
from deployments.replica.replica import Replica
from load_tests.chaos.points import Points
from load_tests.harness.control_plane.books import held_by_replicas, open_sessions
from load_tests.harness.control_plane.fleet import PATIENCE_S, REPLICAS, WAIT_S, left_after, until
from load_tests.harness.control_plane.gates import GatedEngine, GatedPlane
from load_tests.harness.control_plane.ingress import Answer, Ingress
from load_tests.harness.control_plane.ports import Fleet, ManagerPort


class InProcess:
    """The session manager, the replicas and the cluster core, and a frontend that takes the outputs."""

    def __init__(
        self,
        config: BatonConfig,
        timings: Timings = DEFAULT_TIMINGS,
        limits: Limits | None = None,
        manager_timings: ManagerTimings = TIMINGS,
    ) -> None:
        self._config, self._timings, self._manager_timings = config, timings, manager_timings
        self._limits = limits or Limits(config.placement.max_attempts)
        self.manager = SessionManager(config)
        self.manager_port = ManagerPort(self.manager)
        self.engines: dict[str, GatedEngine] = {}
        self.planes: dict[str, GatedPlane] = {}
        self.replicas: dict[str, Replica] = {}
        self.fleet = Fleet(tuple(config.pools), config.placement.ingress_lease_s)
        self.pools = self.fleet.pools
        self.points = Points()
        for each in self.pools.values():
            each.on_point = self.points.reached
        self.answers: dict[str, Answer] = {}
        self._asked = 0
        self._ingress = self._new_ingress()

    def _new_ingress(self) -> Ingress:
        return Ingress(
            self._config,
            self._timings,
            self._limits,
            self.fleet,
            self.manager_port,
            self.answers,
            self._manager_timings,
        )

    @property
    def core(self) -> ClusterCore:
        """The cluster core of the newest ingress."""
        return self._ingress.core

    @property
    def timelines(self) -> Timelines:
        """Those of the newest ingress."""
        return self._ingress.timelines

    @property
    def stand_in(self) -> StandIn:
        """The stand-in of the newest ingress."""
        return self._ingress.stand_in

    async def start(self, *replica_ids: str) -> None:
        """Start replicas, and wait until the session manager knows that they are ready."""
        for replica_id in replica_ids:
            self._build(replica_id)
            await self.fleet.join(replica_id, self.replicas[replica_id])
        await asyncio.gather(*(self.replicas[replica_id].start() for replica_id in replica_ids))
        await until(lambda: self._are_ready(replica_ids))

    def _build(self, replica_id: str) -> None:
        pool = replica_id.rpartition("-")[0]
        role = Role(role_of(pool))
        plane = self.planes[replica_id] = GatedPlane(replica_id)
        engine = self.engines[replica_id] = GatedEngine(
            self._config.pools[pool].engine,
            role=role,
            replica_id=replica_id,
            fingerprint="mock",
            secret="a secret of the tests",
            host="127.0.0.1",
            handoff_timeout_s=self._config.channel.handoff_timeout_s,
            max_model_len=self._config.model.max_model_len,
            plane=plane,
        )
        plane.on_write = lambda: self.points.reached("writing", replica_id)
        engine.on_point = lambda point: self.points.reached(point, replica_id)
        strict = self._config.pools[pool].strict
        identity = Identity(replica_id, pool, role, "node", "127.0.0.1", strict=strict)
        self.replicas[replica_id] = Replica(identity, engine, self.manager_port, self._config.placement)

    async def _are_ready(self, replica_ids: Collection[str]) -> bool:
        pools = (await self.manager.ask(Ready()))["pools"].values()
        loads = {replica_id: replica["load"] for pool in pools for replica_id, replica in pool["replicas"].items()}
        return all(loads.get(replica_id) for replica_id in replica_ids)

    def lose_manager(self) -> None:
        """The session manager dies, and everything that it knew is lost."""
        self.manager_port.lose()

    def restart_manager(self) -> None:
        """A new session manager takes its place."""
        self.manager = SessionManager(self._config, listen_s=LISTEN_S)
        self.manager_port.restart(self.manager)

    def kill_ingress(self) -> None:
        """The ingress dies and loses all that it knew, and a new one takes its place. No other process is told."""
        self.end_ingress()
        for answer in self.answers.values():
            if answer.reason is None:
                answer.cut = True
                answer.news.set()
        self._ingress = self._new_ingress()

    def end_ingress(self) -> None:
        """The ingress dies, and no other takes its place."""
        self._ingress.kill()

    async def close(self) -> None:
        """End everything, the ingress first."""
        self._ingress.shutdown()
        for replica_id in tuple(self.replicas):
            await self.bury(replica_id)
        await self._ingress.close()

    async def ask(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Add a request as vLLM's frontend does.

        `request_id` may be given, the `priority` and the `span` of its HTTP request, and `explains` or `pins`: it is
        not served.
        """
        self._asked += 1
        request_id = sampling.pop("request_id", f"request-{self._asked}")
        of = {name: sampling.pop(name) for name in ("explains", "pins", "priority", "span") if name in sampling}
        context = RequestContext(request_id, **of)
        answer = self.answers[request_id] = Answer(request_id, context)
        self.points.reached("opening")
        await self._ingress.add(answer, prompt, sampling)
        return answer

    def forget(self, answer: Answer) -> None:
        """Forget a request that is over, and its tasks."""
        del self.answers[answer.request_id]
        for pool in self.pools.values():
            pool.tasks.clear()

    async def abort(self, answer: Answer) -> None:
        """The client of the request disconnects."""
        await self.core.abort_requests_async([answer.request_id])

    async def answer(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Add a request, and wait for the end of its answer."""
        return await (await self.ask(prompt, **sampling)).over()

    async def local(self, prompt: Sequence[int], **sampling: Any) -> list[int]:
        """The answer of one decode replica alone."""
        answer = await self.answer(prompt, **{**sampling, "prompt_logprobs": 0})
        assert answer.context.rules == {"prompt_logprobs"}
        return answer.tokens

    async def placements(self) -> dict[str, dict[str, Any]]:
        """The promises of open sessions by request id."""
        return {promise["session_id"]: promise for promise in (await self.manager.ask(Status()))["promises"]}

    async def placed(self, answer: Answer) -> dict[str, Any]:
        """Wait until a request is placed and its ingress knows the placement."""

        async def look() -> Any:
            return (await self.placements()).get(answer.request_id) if answer.context.modes else None

        placed: dict[str, Any] = await until(look)
        return placed

    async def queued(self, count: int) -> None:
        """Wait until `count` requests wait for a place."""

        async def look() -> bool:
            return bool((await self.manager.ask(Status()))["sessions"]["queued"] == count)

        await until(look)

    async def stopped(self, replica_id: str) -> None:
        """Wait until an engine whose `go` is clear has work."""
        await asyncio.wait_for(self.engines[replica_id].stopped.wait(), WAIT_S)

    async def kill(self, replica_id: str) -> None:
        """Kill an engine and its KV channel during their work, and wait until its replica is unhealthy."""
        await self.engines[replica_id].shutdown()

        async def look() -> bool:
            try:
                self.replicas[replica_id].check_health()
            except EngineError:
                return True
            return False

        await until(look)

    async def bury(self, replica_id: str) -> None:
        """Stop what is left of a replica, and remove it."""
        await asyncio.wait_for(self.replicas.pop(replica_id).stop(), WAIT_S)
        self.fleet.leave(replica_id)
        self.engines.pop(replica_id, None)
        self.planes.pop(replica_id, None)

    async def closed(self) -> None:
        """Wait until the core and the manager have no open session. The engines may still have work."""
        await self._until_nothing(lambda: open_sessions(self.core, self.manager))

    async def settle(self, dead: Collection[str] = (), wait_s: float = PATIENCE_S) -> None:
        """Wait until nothing is open anywhere and the engines and the manager count every block as free."""
        await self._until_nothing(lambda: self._left(dead), wait_s)
        assert not [answer.surplus for answer in self.answers.values() if answer.surplus]

    async def left(self, wait_s: float) -> dict[str, Any]:
        """What is still open or held after `wait_s` at most, by name, and as the ingress in this process counts it."""
        return await left_after(wait_s, lambda: self._left(()))

    async def _until_nothing(self, look: Callable[[], Awaitable[dict[str, Any]]], wait_s: float = PATIENCE_S) -> None:
        left = await left_after(wait_s, look)
        assert not left, f"still there after {wait_s:g} s: {left}"

    async def _left(self, dead: Collection[str]) -> dict[str, Any]:
        overcommit = self._config.placement.overcommit
        held = await held_by_replicas(self.replicas, self.engines, self.manager, overcommit, dead)
        return await open_sessions(self.core, self.manager) | held


@contextlib.asynccontextmanager
async def in_process(
    config: BatonConfig,
    replica_ids: Collection[str] = tuple(REPLICAS),
    timings: Timings = DEFAULT_TIMINGS,
    limits: Limits | None = None,
    manager_timings: ManagerTimings = TIMINGS,
) -> AsyncIterator[InProcess]:
    """A control plane with these replicas ready; it is closed at the end."""
    cluster = InProcess(config, timings, limits, manager_timings)
    try:
        await cluster.start(*replica_ids)
        yield cluster
    finally:
        await cluster.close()
