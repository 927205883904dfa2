"""The Serve side of a replica: who it is, from Serve and Ray; everything else is `replica.Replica`."""

from __future__ import annotations

import secrets
from typing import Any

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from configs.schema import BatonConfig
from deployments.engine.build import build_engine
from deployments.messages import Role, SessionReport, SessionTask
from deployments.replica import Identity, Replica
from deployments.serve_ports import ServeManager

SECRET_KEY = b"baton-channel-secret"


class ServeReplica:
    """A replica of one pool. Serve shows the deployment as starting until the engine is loaded."""

    async def __init__(self, config: dict[str, Any], pool: str, manager: DeploymentHandle) -> None:  # type: ignore[misc]
        baton = BatonConfig.model_validate(config)
        identity = Identity(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            pool=pool,
            role=Role.PREFILL if pool == "prefill" else Role.DECODE,
            node_id=ray.get_runtime_context().get_node_id(),
            host=get_node_ip_address(),
        )
        engine = build_engine(baton, identity, cluster_secret(baton))
        self._replica = Replica(identity, engine, ServeManager(manager), baton.placement)
        await self._replica.start()

    async def run(self, task: SessionTask) -> SessionReport:
        """One session's part; see `Replica.run`."""
        return await self._replica.run(task)

    async def counters(self) -> dict[str, float]:
        """The engine's and the KV channel's counters."""
        return await self._replica.counters()

    def check_health(self) -> None:
        """Serve calls this; raising makes it replace the replica."""
        self._replica.check_health()

    async def __del__(self) -> None:
        """Serve calls this once, when the replica's calls are over."""
        await self._replica.stop()


def cluster_secret(config: BatonConfig) -> str:
    """What seals control messages: the configured secret, or one made once per Ray cluster and kept in its GCS."""
    if config.channel.secret is not None:
        return config.channel.secret
    _internal_kv_put(SECRET_KEY, secrets.token_hex(32).encode(), overwrite=False)
    return bytes(_internal_kv_get(SECRET_KEY)).decode()
