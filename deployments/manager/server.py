"""The session manager's side of the connections that ingresses and replicas have to it.

These connections do not go over Serve handles: a call over a handle costs milliseconds of CPU, and a fleet reports all
the time. Serve starts, watches and replaces the manager, and tells callers where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import msgspec

from deployments.manager import wire
from deployments.manager.manager import SessionManager
from deployments.manager.timings import TIMINGS, Timings
from deployments.sealed_connection import Connection, Seal, address_of
from transfer.control.seal import BadMessage

STARTED_AT_ONCE = 16
"""Sessions that are admitted before the event loop looks at its connections again: some ten milliseconds of work."""


class ManagerServer:
    """Answers calls on a free port of `host`. `address`: where, once it is started; "" once it retires."""

    def __init__(self, manager: SessionManager, secret: str, timings: Timings = TIMINGS) -> None:
        self.manager = manager
        self._seal, self._timings = wire.seal(secret), timings
        self._connections: set[_Connection] = set()
        self._alone = asyncio.Event()
        self.admissions = _Turns()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, host: str) -> None:
        """Listen."""
        self._server = await asyncio.get_running_loop().create_server(self._connection, host, 0)
        self.address = address_of(self._server, host)

    def _connection(self) -> _Connection:
        return _Connection(self, self._seal)

    async def retire(self) -> None:
        """Another manager takes over: send callers there, give the answers that are still due, and close."""
        self.address = ""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.send(wire.Retiring(0))
        self.manager.retire()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timings.last_answers_s):
                    await self._alone.wait()
        for connection in tuple(self._connections):
            connection.close()

    # ---- called by connections

    def joined(self, connection: _Connection) -> None:
        """A caller has connected."""
        self._connections.add(connection)
        self._alone.clear()
        if not self.address:
            connection.send(wire.Retiring(0))

    def left(self, connection: _Connection) -> None:
        """A caller's connection is closed."""
        self._connections.discard(connection)
        if not self._connections:
            self._alone.set()


class _Connection(Connection[wire.AnyMessage | wire.Unknown]):
    """One caller. When it is gone, its calls are cancelled, because nothing can receive their answers.

    `queued`: sessions that it asks to open, and that have not begun.
    """

    def __init__(self, server: ManagerServer, seal: Seal) -> None:
        super().__init__(seal, wire.message_of, "a caller of the session manager")
        self._server = server
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.queued: set[int] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.joined(self)

    def take(self, message: wire.AnyMessage | wire.Unknown) -> None:
        number = message.number
        match message:
            case wire.Asked(_, call):
                if wire.is_opening(call):
                    self.queued.add(number)
                    self._server.admissions.add(lambda: self._begin_queued(number, call))
                else:
                    self._begin(number, call)
            case wire.Cancel():
                self.queued.discard(number)
                if (asked := self.calls.get(number)) is not None:
                    asked.cancel()
            case wire.Unknown():
                self.send(wire.Failed(number, "the caller is of another version"))
            case _:
                raise BadMessage(f"a caller does not say {type(message).__name__}")

    def _begin_queued(self, number: int, body: msgspec.Raw) -> None:
        if number in self.queued:
            self.queued.discard(number)
            self._begin(number, body)

    def _begin(self, number: int, body: msgspec.Raw) -> None:
        task = self.calls[number] = asyncio.create_task(self._answer(number, body))
        task.add_done_callback(lambda _: self.calls.pop(number, None))

    async def _answer(self, number: int, body: msgspec.Raw) -> None:
        try:
            answer = wire.packed_answer(await self._server.manager.ask(wire.call_of(body)))
        except Exception as error:  # noqa: BLE001 - the caller hears of it
            self.send(wire.Failed(number, f"{type(error).__name__}: {error}"))
        else:
            self.send(wire.Answered(number, answer))

    def connection_lost(self, error: Exception | None) -> None:
        self._server.left(self)
        self.queued.clear()
        for task in self.calls.values():
            task.cancel()


class _Turns:
    """Begins what it is given, some of it in each turn of the event loop.

    A flood of openings would otherwise be admitted in one turn, and whatever else the manager is asked would wait.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, begin: Callable[[], None]) -> None:
        """Begin it in its turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(begin)

    def _turn(self) -> None:
        for _ in range(min(STARTED_AT_ONCE, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
