"""A replica's side of its connections to ingresses.

A part runs for as long as its connection stands. When the connection breaks, or the ingress is silent for a lease, all
parts of that ingress end: nothing reads their outputs, and nothing would close their sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from deployments.engine.protocol import EngineCrashed, EngineError, RequestRefused
from deployments.host.tasks import OwnTasks
from deployments.link import wire
from deployments.messages import SessionTask
from deployments.sealed_connection import Connection, Seal, address_of
from transfer.control.seal import BadMessage

logger = logging.getLogger("baton.link")

BACKLOG_BYTES = 64 * 1024 * 1024
"""The most bytes that wait for an ingress to read them; then the ingress counts as gone."""


class Ingress(Protocol):
    """What a part knows of the ingress that began it."""

    def give(self, frames: list[bytes], finished: Sequence[int] = ()) -> bool:
        """Send the outputs of one step, without waiting. `finished`: the numbers of the parts that end with them.

        False when the ingress is gone, or has not taken `BACKLOG_BYTES`.
        """


class Runs(Protocol):
    """What runs the parts; see `replica.Replica`."""

    async def run(self, task: SessionTask, ingress: Ingress, number: int) -> str: ...

    def orphan(self, ingress: Ingress) -> None: ...


class LinkServer:
    """Takes in the connections of ingresses. `address`: where, once it is started.

    `lease_s`: the longest time that an ingress may be silent.
    """

    def __init__(self, runs: Runs, secret: str, lease_s: float) -> None:
        self._runs, self._seal, self._lease_s = runs, wire.seal(secret), lease_s
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._tasks = OwnTasks()
        self._watching: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self, host: str) -> None:
        """Listen on a free port of `host`."""
        self._server = await asyncio.get_running_loop().create_server(self._link, host, 0)
        self.address = address_of(self._server, host)
        self._watching = self._tasks.own(self._watch(), "lease")

    @property
    def links(self) -> int:
        """The number of ingresses that are connected."""
        return len(self._links)

    def close(self) -> None:
        """Take no connections any more, and close those that are there when everything is sent; idempotent."""
        if self._server is not None:
            self._server.close()
        if self._watching is not None:
            self._watching.cancel()
        for link in tuple(self._links):
            link.close()

    def _link(self) -> _Link:
        return _Link(self._runs, self._seal, self._links, self._tasks)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / wire.LOOKS)
            for link in tuple(self._links):
                link.look()


class _Link(Connection[wire.AnyMessage | wire.Unknown]):
    """The connection to one ingress. `links`: all that are open. `tasks`: owns the parts."""

    def __init__(self, runs: Runs, seal: Seal, links: set[_Link], tasks: OwnTasks) -> None:
        super().__init__(seal, wire.message_of, "an ingress")
        self._runs, self._links, self._tasks = runs, links, tasks
        self._parts: dict[int, asyncio.Task[None]] = {}
        self._quiet_looks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._links.add(self)

    def look(self) -> None:
        """Break the connection when nothing has come over it for a lease.

        Looks are counted, and not seconds: a process that stood still hears first what has come in the meantime.
        """
        self._quiet_looks += 1
        if self._quiet_looks > wire.LOOKS:
            logger.warning("an ingress has been silent for a lease")
            self._transport.abort()

    # ---- from the ingress

    def take(self, message: wire.AnyMessage | wire.Unknown) -> None:
        self._quiet_looks = 0
        match message:
            case wire.Begin(number, task):
                if number in self._parts:
                    raise BadMessage(f"there is a part {number} already")
                part = self._parts[number] = self._tasks.own(self._run(number, task), "part")
                part.add_done_callback(lambda _: self._parts.pop(number, None))
            case wire.Cancel(number):
                if (running := self._parts.get(number)) is not None:
                    running.cancel()
            case wire.Beat():
                pass
            case wire.Unknown():
                self.send(wire.Failed(message.number, "the ingress is of another version"))
            case _:
                raise BadMessage(f"an ingress does not say {type(message).__name__}")

    async def _run(self, number: int, task: SessionTask) -> None:
        try:
            outcome = await self._runs.run(task, self, number)
        except EngineError as error:
            self.send(wire.Failed(number, str(error), _blame(error)))
        except Exception as error:
            self.send(wire.Failed(number, repr(error)))
            raise
        else:
            if outcome != "finished":  # the last outputs have said that
                self.send(wire.Ended(number, outcome))

    def connection_lost(self, error: Exception | None) -> None:
        self._links.discard(self)
        self._runs.orphan(self)

    # ---- to the ingress

    def give(self, frames: list[bytes], finished: Sequence[int] = ()) -> bool:
        """See `Ingress.give`."""
        if self._transport.is_closing() or self._transport.get_write_buffer_size() > BACKLOG_BYTES:
            return False
        self.send(wire.Outputs(0, frames, list(finished)))
        return True


def _blame(error: EngineError) -> wire.Blame:
    match error:
        case RequestRefused():
            return wire.Blame.REQUEST
        case EngineCrashed():
            return wire.Blame.CRASH
        case _:
            return wire.Blame.NONE
