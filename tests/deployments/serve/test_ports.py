"""What a call to another deployment ends with, whichever way Serve carries it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray.exceptions

from deployments.errors import ReplicaLost
from deployments.messages import ReplicaInfo, Role, SessionTask
from deployments.serve.ports import Pools

REPLICA = ReplicaInfo("p0", "prefill", Role.PREFILL, "node", "engine", 16, 100, 8, 2048)
TASK = SessionTask("s", 1, "p0", "r", (), 60.0, 100)


class Handle:
    """A Serve handle all of whose calls end with one error."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.address = SimpleNamespace(remote=self._remote)

    async def _remote(self, *args: Any) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.RayError("the actor died"),
        grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), "its server ended"),
    ],
    ids=["ray", "grpc"],
)
async def test_a_call_that_its_replica_does_not_answer_loses_the_replica(error: Exception) -> None:
    with pytest.raises(ReplicaLost):
        await Pools({"prefill": Handle(error)}).find(REPLICA, TASK)


async def test_an_error_of_our_own_making_is_not_taken_for_a_lost_replica() -> None:
    with pytest.raises(KeyError):
        await Pools({"prefill": Handle(KeyError("x"))}).find(REPLICA, TASK)
