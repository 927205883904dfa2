"""The session manager's client, for ingresses and replicas: calls over a connection that Serve does not manage.

The creator of a client says how to find the manager. Finding it takes one Serve call for each new manager. A connection
that breaks fails every call that is open on it at once: that is how a caller learns of a manager's death.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Awaitable, Callable

import msgspec

from deployments.errors import Unavailable
from deployments.manager import wire
from deployments.manager.calls import A, Call
from deployments.manager.timings import TIMINGS, Timings
from deployments.sealed_connection import Connection, Seal, connect, packed
from transfer.control.seal import BadMessage


class ManagerClient:
    """`calls.Manager` over a connection. Cancelling a call cancels it in the manager too.

    `locate`: where the manager is, `host:port`; "" while one retires and its successor is not known yet. It raises
    Unavailable. Create the client in a running event loop.
    """

    def __init__(self, locate: Callable[[], Awaitable[str]], secret: str, timings: Timings = TIMINGS) -> None:
        self._locate, self._seal, self._timings = locate, wire.seal(secret), timings
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        # Ray cancels what was called in a client's context when that client goes; a connection serves all callers.
        self._context = contextvars.copy_context()

    async def ask(self, call: Call[A]) -> A:
        """The answer to a call. Raises Unavailable when the manager cannot be reached, ends before it answers, fails,
        or is of a version that does not know the call.
        """
        connection = self._connection
        if connection is None or not connection.takes_calls:
            connection = await self._connected()
        try:
            return wire.answer_of(call, await connection.ask(packed(call)))
        except BadMessage as error:
            raise Unavailable(f"the session manager's answer is not understood: {error}") from error

    def shutdown(self) -> None:
        """Let the connection go; idempotent."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> _Connection:
        """A connection. All callers wait for the same attempt, and one that is cancelled does not end it."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(), context=self._context.copy())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._timings.locate_s):
                while not (address := await self._locate()):  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(self._timings.locate_again_s)
                connection = await connect(address, self._new)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"the session manager cannot be reached: {error or type(error).__name__}") from error
        self._connection = connection
        return connection

    def _new(self) -> _Connection:
        return _Connection(self._seal)


class _Connection(Connection[wire.AnyMessage | wire.Unknown]):
    """One connection to one manager. Once it is broken, the client makes another."""

    def __init__(self, seal: Seal) -> None:
        super().__init__(seal, wire.message_of, "the session manager", greeting=wire.Cancel(0))
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._retires = self._is_over = False

    @property
    def takes_calls(self) -> bool:
        """Whether it stands, and its manager does not retire."""
        return not (self._retires or self._is_over)

    async def ask(self, call: msgspec.Raw) -> msgspec.Raw:
        """An encoded call's encoded answer. Raises Unavailable."""
        if self._is_over:
            raise Unavailable("the session manager has gone")
        number = next(self._numbers)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self.send(wire.Asked(number, call))
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
        if self._retires and not self._open:
            self.close()

    def take(self, message: wire.AnyMessage | wire.Unknown) -> None:
        match message:
            case wire.Answered():
                answer = self._open.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message.answer)
            case wire.Failed():
                self._fail(message.number, f"the session manager failed: {message.why}")
            case wire.Unknown():
                self._fail(message.number, "the session manager's answer is of another version")
            case wire.Retiring():
                self._retires = True
                self._close_if_idle()
            case _:
                raise BadMessage(f"a session manager does not say {type(message).__name__}")

    def _fail(self, number: int, why: str) -> None:
        answer = self._open.get(number)
        if answer is not None and not answer.done():
            answer.set_exception(Unavailable(why))

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = True
        for number in self._open:
            self._fail(number, f"the session manager has gone ({error or 'it hung up'})")
