"""The session manager over a connection of our own: what ingresses and replicas call.

Whoever creates a client says how to find out where the manager is; that goes over Serve, once for each manager. A
connection that breaks fails every call that is open on it at once: that is how the death of a manager is found out.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from deployments.errors import Unavailable
from deployments.manager import wire
from deployments.messages import Admit, ManagerView, Reject, ReplicaSnapshot, ReportAnswer, SessionRequest
from transfer.control.seal import BadMessage, SealOf

T = TypeVar("T")

LOCATE_S, AGAIN_S = 10.0, 0.1
"""So long it takes at most to find a manager and connect to it, asking again every AGAIN_S where one is leaving."""


class ManagerClient:
    """See `session_manager.SessionManager`, whose methods these are. Every call raises Unavailable when the manager
    cannot be reached, or is gone before it answers. Cancelling a call cancels it there.

    `locate`: where the manager is, `host:port`; "" while one is leaving and its successor is not known yet. It raises
    Unavailable. Create it in a running event loop.
    """

    def __init__(self, locate: Callable[[], Awaitable[str]], secret: str) -> None:
        self._locate, self._seal = locate, wire.seal(secret)
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        # Ray cancels what was called in a client's context when that client goes; a connection serves everybody.
        self._context = contextvars.copy_context()

    async def open(self, request: SessionRequest) -> Admit | Reject:
        answer = await self._ask(lambda number: wire.Open(number, request))
        return Admit(answer.placement) if isinstance(answer, wire.Placed) else _a(wire.Rejected, answer).reject

    async def prefill_done(self, session_id: str, epoch: int) -> None:
        await self._ask(lambda number: wire.PrefillDone(number, session_id, epoch))

    async def close(
        self, session_id: str, epoch: int, outcome: str, output_tokens: int | None = None, ended: bool = False
    ) -> None:
        await self._ask(lambda number: wire.Close(number, session_id, epoch, outcome, output_tokens, ended))

    async def lost(self, replica_id: str, gone: bool = False) -> None:
        await self._ask(lambda number: wire.Lost(number, replica_id, gone))

    async def silent(self, replica_ids: Sequence[str]) -> tuple[str, ...]:
        answer = await self._ask(lambda number: wire.Silent(number, tuple(replica_ids)))
        return _a(wire.SilentOnes, answer).replica_ids

    async def view(self, after_s: float) -> ManagerView:
        return _a(wire.Viewed, await self._ask(lambda number: wire.View(number, after_s))).view

    async def report(self, snapshot: ReplicaSnapshot) -> ReportAnswer:
        return _a(wire.Heeded, await self._ask(lambda number: wire.Report(number, snapshot))).answer

    async def ready(self) -> dict[str, Any]:
        return _a(wire.Shown, await self._ask(wire.Ready)).shown

    async def status(self) -> dict[str, Any]:
        return _a(wire.Shown, await self._ask(wire.Status)).shown

    def shutdown(self) -> None:
        """Let the connection go; idempotent."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _ask(self, call: Callable[[int], wire.Call]) -> wire.Answer:
        connection = self._connection
        if connection is None or not connection.takes_calls:
            connection = await self._connected()
        answer = await connection.ask(call)
        if isinstance(answer, wire.Failed):
            raise Unavailable(f"the session manager failed: {answer.why}")
        return answer

    async def _connected(self) -> _Connection:
        """The connection that all who ask meanwhile wait for; one caller's end does not end the attempt."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(), context=self._context.copy())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(LOCATE_S):
                while not (address := await self._locate()):  # noqa: ASYNC110 - nothing tells us
                    await asyncio.sleep(AGAIN_S)
                host, _, port = address.rpartition(":")
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(self._new, host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"the session manager cannot be reached: {error or type(error).__name__}") from error
        self._connection = connection
        return connection

    def _new(self) -> _Connection:
        return _Connection(self._seal)


class _Connection(wire.Connection):
    """One connection to one manager, never made again."""

    def __init__(self, sealed: SealOf[wire.AnyMessage]) -> None:
        super().__init__(sealed, "the session manager")
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[wire.Answer]] = {}
        self._is_leaving = self._is_over = False

    @property
    def takes_calls(self) -> bool:
        """It stands, and leads to a manager that stays."""
        return not (self._is_leaving or self._is_over)

    async def ask(self, call: Callable[[int], wire.Call]) -> wire.Answer:
        if self._is_over:
            raise Unavailable("the session manager has gone")
        number = next(self._numbers)
        answer: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self.send(call(number))
            return await answer
        except asyncio.CancelledError:
            self.send(wire.Cancel(number))
            raise
        finally:
            del self._open[number]
            self._close_if_idle()

    def close(self) -> None:
        self._is_over = True
        super().close()

    def _close_if_idle(self) -> None:
        if self._is_leaving and not self._open:
            self.close()

    def take(self, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Leaving):
            self._is_leaving = True
            self._close_if_idle()
        elif isinstance(message, wire.Answer):
            answer = self._open.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            raise BadMessage(f"a session manager does not say {type(message).__name__}")

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = True
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(Unavailable(f"the session manager has gone ({error or 'it hung up'})"))


def _a(kind: type[T], answer: wire.Answer) -> T:
    """The answer, if it is of this kind. Raises Unavailable: so might a manager of another version answer."""
    if not isinstance(answer, kind):
        raise Unavailable(f"the session manager answered with {type(answer).__name__}")
    return answer
