"""How ingresses and replicas find other processes of the application, through Serve handles."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import ray.exceptions
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from configs.schema import BatonConfig
from deployments.engine.protocol import EngineError
from deployments.errors import ReplicaLost, Unavailable
from deployments.manager.client import ManagerClient
from deployments.messages import Locate, ReplicaInfo, SessionTask
from deployments.serve.cluster_secret import cluster_secret

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
