"""Direct ports that replace Serve handles and connections to the manager.

Messages are encoded, as they are between processes. When a call is cancelled, the call on the replica is cancelled too,
and nothing waits for its end, as in Serve.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deployments.engine.protocol import EngineError
from deployments.errors import ReplicaLost, Unavailable
from deployments.manager import wire
from deployments.manager.calls import A, Call
from deployments.manager.manager import SessionManager
from deployments.messages import SessionReport, SessionTask
from deployments.replica.replica import Replica


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
        asked = asyncio.ensure_future(self._manager.ask(wire.call_of(wire.packed_call(call))))
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Unavailable("it has died")
            return wire.answer_of(call, wire.packed_answer(asked.result()))
        finally:
            asked.cancel()
            dead.cancel()


class Pool:
    """A pool's port. `error`: every call raises it. `reply_to`: outputs go to this address instead."""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self._replicas = replicas
        self.tasks: list[SessionTask] = []
        self.error: Exception | None = None
        self.reply_to: str | None = None
        self.on_point: Callable[[str, str], None] = lambda point, replica_id: None

    async def run(self, task: SessionTask) -> SessionReport:
        task = pickle.loads(pickle.dumps(task))
        self.tasks.append(task)
        self.on_point("placed", task.replica_id)
        if self.error is not None:
            raise self.error
        if self.reply_to is not None:
            task = replace(task, reply_to=self.reply_to)
        if task.replica_id not in self._replicas:
            raise ReplicaLost(f"there is no {task.replica_id}")
        call = asyncio.create_task(self._replicas[task.replica_id].run(task))
        try:
            report: SessionReport = pickle.loads(pickle.dumps(await asyncio.shield(call)))
        except EngineError as error:
            raise ReplicaLost(str(error)) from error
        except asyncio.CancelledError:
            call.cancel()
            raise
        self.on_point("closing", task.replica_id)
        return report


class ManagerLine:
    """The calls of one ingress to the session manager. After it is cut, because the ingress died, every call fails."""

    def __init__(self, port: ManagerPort) -> None:
        self._port, self.is_cut = port, False

    async def ask(self, call: Call[A]) -> A:
        """The manager's answer to a call. Raises Unavailable."""
        if self.is_cut:
            raise Unavailable("its ingress has died")
        return await self._port.ask(call)


class Line:
    """The calls of one ingress to a pool. After it is cut, because the ingress died, its open calls continue."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self.is_cut = pool, False

    async def run(self, task: SessionTask) -> SessionReport:
        call = asyncio.create_task(self._pool.run(task))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not self.is_cut:
                call.cancel()
            call.add_done_callback(_ignore)
            raise


def _ignore(call: asyncio.Task[Any]) -> None:
    if not call.cancelled():
        call.exception()
