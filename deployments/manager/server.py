"""The session manager's side of the connections that ingresses and replicas have to it.

They do not come over Serve handles: a call over one costs milliseconds of CPU, and a fleet reports all the time. Serve
starts, watches and replaces the manager, and tells callers where it is.
"""

from __future__ import annotations

import asyncio
import contextlib

from deployments.manager import wire
from deployments.manager.manager import SessionManager
from deployments.messages import Admit
from transfer.control.seal import BadMessage, SealOf

LAST_ANSWERS_S = 5.0
"""So long callers of a manager that leaves have to hang up; the longest call that they wait for is a view, a second."""


class ManagerServer:
    """Answers calls on a free port of `host`; `address` is where, once it has been started."""

    def __init__(self, manager: SessionManager, secret: str) -> None:
        self._manager, self._seal = manager, wire.seal(secret)
        self._connections: set[_Connection] = set()
        self._alone = asyncio.Event()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, host: str) -> None:
        """Listen."""
        self._server = await asyncio.get_running_loop().create_server(self._connection, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _connection(self) -> _Connection:
        return _Connection(self, self._seal)

    async def retire(self) -> None:
        """Another manager takes over: send callers there, give the answers that are owed, and close."""
        self.address = ""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.send(wire.Leaving(0))
        self._manager.retire()
        if self._connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_ANSWERS_S):
                    await self._alone.wait()
        for connection in tuple(self._connections):
            connection.close()

    # ---- called by connections

    def joined(self, connection: _Connection) -> None:
        self._connections.add(connection)
        self._alone.clear()
        if not self.address:
            connection.send(wire.Leaving(0))

    def left(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._alone.set()

    async def answer(self, call: wire.Call) -> wire.Answer:
        """Have a call carried out."""
        manager, number = self._manager, call.number
        match call:
            case wire.Report():
                return wire.Heeded(number, await manager.report(call.snapshot))
            case wire.Open():
                decision = await manager.open(call.request)
                if isinstance(decision, Admit):
                    return wire.Placed(number, decision.placement)
                return wire.Rejected(number, decision)
            case wire.Silent():
                return wire.SilentOnes(number, await manager.silent(call.replica_ids))
            case wire.View():
                return wire.Viewed(number, await manager.view(call.after_s))
            case wire.Ready():
                return wire.Shown(number, await manager.ready())
            case wire.Status():
                return wire.Shown(number, await manager.status())
            case wire.PrefillDone():
                await manager.prefill_done(call.session_id, call.epoch)
            case wire.Close():
                await manager.close(call.session_id, call.epoch, call.outcome, call.output_tokens, call.ended)
            case wire.Lost():
                await manager.lost(call.replica_id, call.gone)
        return wire.Told(number)


class _Connection(wire.Connection):
    """One caller. When it is gone, so are its calls: nobody would learn of their answers."""

    def __init__(self, server: ManagerServer, sealed: SealOf[wire.AnyMessage]) -> None:
        super().__init__(sealed, "a caller of the session manager")
        self._server = server
        self.calls: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.joined(self)

    def take(self, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Cancel):
            if (task := self.calls.get(message.number)) is not None:
                task.cancel()
        elif isinstance(message, wire.Call):
            number = message.number
            task = self.calls[number] = asyncio.create_task(self._answered(message))
            task.add_done_callback(lambda _: self.calls.pop(number, None))
        else:
            raise BadMessage(f"a caller does not say {type(message).__name__}")

    async def _answered(self, call: wire.Call) -> None:
        try:
            answer = await self._server.answer(call)
        except Exception as error:  # noqa: BLE001 - it is the caller's to hear of
            answer = wire.Failed(call.number, f"{type(error).__name__}: {error}")
        self.send(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.left(self)
        for task in self.calls.values():
            task.cancel()
