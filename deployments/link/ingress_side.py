"""An ingress's side of its connections to replicas.

The first part for a replica makes the connection; Serve says where the replica is. A connection that breaks loses every
part that is open on it, at once: that is how an ingress learns of a replica's death.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from deployments.errors import ReplicaCrashed, ReplicaLost, RequestFault
from deployments.host.tasks import OwnTasks
from deployments.link import wire
from deployments.messages import ReplicaInfo, SessionTask
from deployments.sealed_connection import Connection, Seal, connect
from transfer.control.seal import BadMessage

CONNECT_S = 15.0
"""The longest time to find a replica and connect to it. Serve may need some seconds to know a new one."""

Find = Callable[[ReplicaInfo, SessionTask], Awaitable[str]]
"""Where a replica listens, `host:port`. Raises ReplicaLost."""
Take = Callable[[str, Sequence[bytes]], None]
"""Takes the outputs of one step: the replica's id, and the frames of an encoded EngineCoreOutputs."""


class Part(Protocol):
    """What is told of a part that has begun: its end, once; nothing after it was cancelled."""

    def ended(self, outcome: str) -> None:
        """The replica has ended it. `outcome`: `finished`, `expired` or `MOVED`. Its last outputs have been taken."""

    def lost(self, error: ReplicaLost) -> None:
        """The replica cannot be found or reached, has gone, or has failed."""

    def refused(self, error: RequestFault) -> None:
        """The replica's engine cannot take the request, and no other could."""


class Links:
    """The connections of one ingress, one to each replica that it has used. Create it in a running event loop.

    `find`: where a replica is. `lease_s`: the longest time that a replica lets an ingress be silent.
    """

    def __init__(self, find: Find, secret: str, lease_s: float) -> None:
        self._find, self._seal, self._lease_s = find, wire.seal(secret), lease_s
        self._links: dict[str, _Link] = {}
        self._take: Take = lambda replica_id, frames: None
        # Ray cancels what was called in a client's context when that client goes; a connection serves all clients.
        self._tasks = OwnTasks()
        self._tasks.own(self._beat(), "beat")

    def listen(self, take: Take) -> None:
        """Give all outputs to `take`."""
        self._take = take

    def begin(self, replica: ReplicaInfo, task: SessionTask, part: Part) -> Callable[[], None]:
        """Begin a part on a replica, and return at once a function that cancels it. Cancelling is idempotent, also
        after its end.
        """
        link = self._links.get(replica.replica_id)
        if link is None or link.is_over:
            link = self._links[replica.replica_id] = _Link(self._seal, replica.replica_id, self._take)
            self._tasks.own(self._connect(link, replica, task), "connect")
        return link.begin(task, part)

    def close(self) -> None:
        """Close every connection; idempotent. Parts that are open are told nothing."""
        self._tasks.cancel()
        for link in self._links.values():
            link.let_go()
        self._links.clear()

    async def _connect(self, link: _Link, replica: ReplicaInfo, task: SessionTask) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await connect(await self._find(replica, task), lambda: link)
        except ReplicaLost as error:
            link.lose(error)
        except TimeoutError:
            link.lose(ReplicaLost(f"replica {replica.replica_id} was not reached within {CONNECT_S:g} s"))
        except OSError as error:
            link.lose(ReplicaLost(f"replica {replica.replica_id} cannot be reached: {error}"))
        except Exception:
            link.lose(ReplicaLost(f"replica {replica.replica_id} was not reached"))
            raise

    async def _beat(self) -> None:
        """Give every replica a sign of life in time."""
        while True:
            await asyncio.sleep(self._lease_s / wire.LOOKS)
            self._links = {replica_id: link for replica_id, link in self._links.items() if not link.is_over}
            for link in self._links.values():
                link.beat()


class _Link(Connection[wire.AnyMessage | wire.Unknown]):
    """The connection to one replica. Until it is made, parts wait in it. `is_over`: it takes no parts any more."""

    def __init__(self, seal: Seal, replica_id: str, take: Take) -> None:
        super().__init__(seal, wire.message_of, f"replica {replica_id}", greeting=wire.Beat(0))
        self._replica_id, self._take_outputs = replica_id, take
        self._numbers = itertools.count(1)
        self._parts: dict[int, Part] = {}
        self._waiting: dict[int, SessionTask] = {}
        self._is_up = self.is_over = False

    # ---- to the replica

    def begin(self, task: SessionTask, part: Part) -> Callable[[], None]:
        number = next(self._numbers)
        self._parts[number] = part
        if self._is_up:
            self.send(wire.Begin(number, task))
        else:
            self._waiting[number] = task
        return lambda: self._cancel(number)

    def _cancel(self, number: int) -> None:
        if self._parts.pop(number, None) is None:
            return
        if self._waiting.pop(number, None) is None and not self.is_over:
            self.send(wire.Cancel(number))

    def beat(self) -> None:
        """Say that the ingress is alive."""
        if self._is_up:
            self.send(wire.Beat(0))

    # ---- from the replica

    def take(self, message: wire.AnyMessage | wire.Unknown) -> None:
        match message:
            case wire.Outputs():
                self._take_outputs(self._replica_id, message.frames)
                for number in message.finished:
                    self._end(number, "finished")
            case wire.Ended():
                self._end(message.number, message.outcome)
            case wire.Failed():
                self._fail(message)
            case wire.Unknown():
                self._lose(message.number, ReplicaLost("the replica is of another version"))
            case _:
                raise BadMessage(f"a replica does not say {type(message).__name__}")

    def _end(self, number: int, outcome: str) -> None:
        if (part := self._parts.pop(number, None)) is not None:
            part.ended(outcome)

    def _fail(self, failed: wire.Failed) -> None:
        if failed.blame != wire.Blame.REQUEST:
            how = ReplicaCrashed if failed.blame == wire.Blame.CRASH else ReplicaLost
            self._lose(failed.number, how(failed.why))
        elif (part := self._parts.pop(failed.number, None)) is not None:
            part.refused(RequestFault(failed.why))

    def _lose(self, number: int, error: ReplicaLost) -> None:
        if (part := self._parts.pop(number, None)) is not None:
            part.lost(error)

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.is_over:
            self.close()
            return
        self._is_up = True
        waiting, self._waiting = self._waiting, {}
        for number, task in waiting.items():
            self.send(wire.Begin(number, task))

    def connection_lost(self, error: Exception | None) -> None:
        self.lose(ReplicaLost(f"replica {self._replica_id} has gone ({error or 'it hung up'})"))

    def lose(self, error: ReplicaLost) -> None:
        """The connection is over, or could not be made: all its parts are lost."""
        self.is_over, self._is_up = True, False
        parts, self._parts = self._parts, {}
        self._waiting.clear()
        for part in parts.values():
            part.lost(error)

    def let_go(self) -> None:
        """Close the connection, and tell no part."""
        was_up, self.is_over, self._is_up = self._is_up, True, False
        self._parts.clear()
        self._waiting.clear()
        if was_up:
            self.close()
