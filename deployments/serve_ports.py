"""The cluster core's and the replicas' ports to other deployments, over Serve handles."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray.exceptions
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.engine.protocol import EngineError
from deployments.errors import ReplicaLost, Unavailable
from deployments.messages import (
    Admit,
    ManagerView,
    Reject,
    ReplicaSnapshot,
    ReportAnswer,
    SessionReport,
    SessionRequest,
    SessionTask,
)

_GONE = (ray.exceptions.RayError, RayServeException, EngineError, OSError)


async def _ask(handle: DeploymentHandle, method: str, *args: Any) -> Any:
    """Call a deployment; a cancelled caller cancels the call on the replica."""
    response = getattr(handle, method).remote(*args)
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


class ServePool:
    """A pool deployment whose router delivers a task to the replica it names."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def run(self, task: SessionTask) -> SessionReport:
        """Raises ReplicaLost."""
        try:
            report: SessionReport = await _ask(self._handle, "run", task)
        except _GONE as error:
            raise ReplicaLost(_why(error)) from error
        return report


class ServePools(dict[str, ServePool]):
    """The pools by name. An update may bring one that an ingress from before it was not told of."""

    def __missing__(self, name: str) -> ServePool:
        application = serve.get_replica_context().app_name
        pool = self[name] = ServePool(serve.get_deployment_handle(name, application))
        return pool


class ServeManager:
    """The session manager's deployment. Every call raises Unavailable while it cannot be reached."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def open(self, request: SessionRequest) -> Admit | Reject:
        decision: Admit | Reject = await self._call("open", request)
        return decision

    async def prefill_done(self, session_id: str, epoch: int) -> None:
        await self._call("prefill_done", session_id, epoch)

    async def close(self, session_id: str, epoch: int, outcome: str, output_tokens: int | None = None) -> None:
        await self._call("close", session_id, epoch, outcome, output_tokens)

    async def lost(self, replica_id: str, gone: bool = False) -> None:
        await self._call("lost", replica_id, gone)

    async def silent(self, replica_ids: Sequence[str]) -> tuple[str, ...]:
        silent: tuple[str, ...] = await self._call("silent", replica_ids)
        return silent

    async def view(self, after_s: float) -> ManagerView:
        view: ManagerView = await self._call("view", after_s)
        return view

    async def report(self, snapshot: ReplicaSnapshot) -> ReportAnswer:
        answer: ReportAnswer = await self._call("report", snapshot)
        return answer

    async def ready(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("ready")
        return answer

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("status")
        return answer

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await _ask(self._handle, method, *args)
        except _GONE as error:
            raise Unavailable(f"the session manager cannot be reached: {_why(error)}") from error


def _why(error: BaseException) -> str:
    """The last line: Ray's messages carry whole tracebacks."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
