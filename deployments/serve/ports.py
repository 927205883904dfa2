"""How ingresses and replicas find other processes of the application, through Serve handles."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import ray.exceptions
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from configs.schema import BatonConfig
from deployments.engine.protocol import EngineError, WorkerSpans
from deployments.errors import ReplicaLost, Unavailable
from deployments.manager.client import ManagerClient
from deployments.messages import Locate, ReplicaInfo, SessionTask
from deployments.serve.cluster_secret import cluster_secret

logger = logging.getLogger("baton.serve")

GONE = (ray.exceptions.RayError, RayServeException, grpc.RpcError, EngineError, OSError)
"""What a call over a handle raises where the other side cannot be reached, or fails."""


async def ask_handle(handle: DeploymentHandle, method: str, *args: Any) -> Any:
    """Call a deployment. Raises one of `GONE`. A caller that is cancelled cancels the call on the replica too."""
    response = getattr(handle, method).remote(*args)
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


async def ask_all(deployment: str, method: str, argument: object, timeout_s: float) -> list[Any]:
    """What all replicas of a deployment of this application say; errors among it. Empty where none can be asked."""
    handle = serve.get_deployment_handle(deployment, serve.get_replica_context().app_name)
    try:
        asked = handle.broadcast(method, argument)
        return list(await asked.results_async(timeout_s=timeout_s, return_exceptions=True))
    except (*GONE, TimeoutError) as error:
        logger.warning("%s does not answer: %s", deployment, last_line(error))
        return []


class Pools(dict[str, DeploymentHandle]):
    """The pools' handles by name. An update may add a pool that an older ingress does not know; its handle is then made
    here.
    """

    def __missing__(self, name: str) -> DeploymentHandle:
        application = serve.get_replica_context().app_name
        handle = self[name] = serve.get_deployment_handle(name, application)
        return handle

    async def find(self, replica: ReplicaInfo, task: SessionTask) -> str:
        """Where a replica listens to ingresses, `host:port`. Raises ReplicaLost."""
        asked = Locate(replica.replica_id, task.session_id, task.hands_over)
        try:
            return str(await ask_handle(self[replica.pool], "address", asked))
        except GONE as error:
            raise ReplicaLost(last_line(error)) from error

    async def spans(self, pool: str, replica_id: str, session_ids: list[str]) -> list[WorkerSpans]:
        """What a replica's KV channels did for these sessions. Raises ReplicaLost."""
        asked = Locate(replica_id, session_ids[0], hands_over=True)
        try:
            found: list[WorkerSpans] = await ask_handle(self[pool], "spans", asked, session_ids)
        except GONE as error:
            raise ReplicaLost(last_line(error)) from error
        return found


def manager_client(handle: DeploymentHandle, config: BatonConfig) -> ManagerClient:
    """The session manager's client. It asks Serve for the manager's address. Call this in a running event loop."""

    async def locate() -> str:
        try:
            return str(await ask_handle(handle, "address"))
        except GONE as error:
            raise Unavailable(f"the session manager cannot be found: {last_line(error)}") from error

    return ManagerClient(locate, cluster_secret(config))


def last_line(error: BaseException) -> str:
    """The last line of the error's message, because Ray's messages carry whole tracebacks."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
