"""Ports that replace Serve handles and connections to the manager.

Messages to the manager are encoded, as they are between processes. The links between an ingress and the replicas are
real ones, over loopback; what Serve does for them, a `Fleet` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deployments.errors import ReplicaLost, RequestFault, Unavailable
from deployments.link.ingress_side import Links, Part, Take
from deployments.link.replica_side import LinkServer
from deployments.manager import wire
from deployments.manager.calls import A, Call
from deployments.manager.manager import SessionManager
from deployments.messages import ReplicaInfo, SessionTask
from deployments.replica.replica import Replica
from deployments.sealed_connection import packed

SECRET = "a secret of the tests"


class ManagerPort:
    """The session manager's port. It behaves as the connections to the manager do.

    A call that is open when the manager dies fails at once. A call that is made while there is no manager waits for the
    next manager.
    """

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._dead, self._born = asyncio.Event(), asyncio.Event()
        self._born.set()

    def lose(self) -> None:
        """The manager dies."""
        self._born = asyncio.Event()
        self._dead.set()

    def restart(self, manager: SessionManager) -> None:
        """A new manager takes its place."""
        self._manager, self._dead = manager, asyncio.Event()
        self._born.set()

    async def ask(self, call: Call[A]) -> A:
        """The manager's answer to a call. Raises Unavailable when the manager dies before it answers."""
        await self._born.wait()
        asked = asyncio.ensure_future(self._manager.ask(wire.call_of(packed(call))))
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Unavailable("it has died")
            return wire.answer_of(call, wire.packed_answer(asked.result()))
        finally:
            asked.cancel()
            dead.cancel()


@dataclass
class Pool:
    """What tests see of a pool, and what they do to it.

    `tasks`: the parts that were begun. `error`: every part that begins is lost by it, or, if it is no ReplicaLost,
    cannot begin. `swallows`: parts that begin never reach their replica. `loses_outputs`: its outputs do not arrive.
    `held`: while this is a list, its outputs are kept there.
    """

    tasks: list[SessionTask] = field(default_factory=list)
    error: Exception | None = None
    loses_outputs: bool = False
    swallows: bool = False
    held: list[tuple[str, Sequence[bytes]]] | None = None
    on_point: Callable[[str, str], None] = lambda point, replica_id: None


class Fleet:
    """The replicas, and the pools that they are of. It says where a replica listens, as Serve does."""

    def __init__(self, pools: Sequence[str], lease_s: float) -> None:
        self.pools = {name: Pool() for name in pools}
        self._lease_s = lease_s
        self._servers: dict[str, LinkServer] = {}

    async def join(self, replica_id: str, replica: Replica) -> None:
        """A replica is there."""
        server = self._servers[replica_id] = LinkServer(replica, SECRET, self._lease_s)
        await server.start("127.0.0.1")

    def leave(self, replica_id: str) -> None:
        """A replica has stopped."""
        self._servers.pop(replica_id).close()

    @property
    def addresses(self) -> dict[str, str]:
        """Where each replica listens, by its id."""
        return {replica_id: server.address for replica_id, server in self._servers.items()}

    @property
    def links(self) -> int:
        """The links that stand now, of all ingresses."""
        return sum(server.links for server in self._servers.values())

    async def find(self, replica: ReplicaInfo, task: SessionTask) -> str:
        """Where a replica listens. Raises ReplicaLost."""
        if (server := self._servers.get(replica.replica_id)) is None:
            raise ReplicaLost(f"there is no {replica.replica_id}")
        return server.address


class Watched:
    """The links of one ingress, watched and disturbed as its pools say."""

    def __init__(self, fleet: Fleet, lease_s: float) -> None:
        self._fleet, self._links = fleet, Links(lambda *asked: fleet.find(*asked), SECRET, lease_s)
        self._take: Take = lambda replica_id, frames: None

    def listen(self, take: Take) -> None:
        self._take = take
        self._links.listen(self._pass_on)

    def begin(self, replica: ReplicaInfo, task: SessionTask, part: Part) -> Callable[[], None]:
        pool = self._fleet.pools[replica.pool]
        pool.tasks.append(task)
        pool.on_point("placed", replica.replica_id)
        if isinstance(pool.error, ReplicaLost):
            asyncio.get_running_loop().call_soon(part.lost, pool.error)
            return lambda: None
        if pool.error is not None:
            raise pool.error
        if pool.swallows:
            return lambda: None
        return self._links.begin(replica, task, _Told(part, pool, replica.replica_id))

    def _pass_on(self, replica_id: str, frames: Sequence[bytes]) -> None:
        pool = self._fleet.pools[replica_id.rpartition("-")[0]]
        if pool.held is not None:
            pool.held.append((replica_id, frames))
        elif not pool.loses_outputs:
            self._take(replica_id, frames)

    def close(self) -> None:
        self._links.close()


@dataclass
class _Told:
    """Passes on what is told of a part."""

    part: Part
    pool: Pool
    replica_id: str

    def ended(self, outcome: str) -> None:
        self.pool.on_point("closing", self.replica_id)
        if self.pool.held is None or outcome != "finished":
            self.part.ended(outcome)

    def lost(self, error: ReplicaLost) -> None:
        self.part.lost(error)

    def refused(self, error: RequestFault) -> None:
        self.part.refused(error)


class ManagerLine:
    """The calls of one ingress to the session manager. After it is cut, because the ingress died, every call fails."""

    def __init__(self, port: ManagerPort) -> None:
        self._port, self.is_cut = port, False

    async def ask(self, call: Call[A]) -> A:
        """The manager's answer to a call. Raises Unavailable."""
        if self.is_cut:
            raise Unavailable("its ingress has died")
        return await self._port.ask(call)
