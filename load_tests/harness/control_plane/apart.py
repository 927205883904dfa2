"""The control plane and its ingress as two processes, so that what clients do costs nothing but the ingress.

`apart` starts both. `python -m load_tests.harness.control_plane.apart fleet|ingress` is one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from app import access_log
from configs.schema import BatonConfig
from deployments.cluster.recovery import Limits
from deployments.errors import ReplicaLost
from deployments.host.garbage import starting
from deployments.link.ingress_side import Links
from deployments.manager.client import ManagerClient
from deployments.manager.server import ManagerServer
from deployments.manager.stand_in import StandIn
from deployments.messages import ReplicaInfo, SessionTask
from load_tests.harness.application import free_port
from load_tests.harness.child import Child, Parent, child
from load_tests.harness.control_plane.fleet import left_after
from load_tests.harness.control_plane.in_process import in_process
from load_tests.harness.control_plane.ingress import core_between
from load_tests.harness.control_plane.ports import SECRET
from load_tests.harness.control_plane.server import Served, serving
from load_tests.harness.loop_watch import LoopWatch

HOST = "127.0.0.1"


class Apart:
    """The two processes. `url`: where the ingress listens."""

    def __init__(self, fleet: Child, ingress: Child, url: str) -> None:
        self._fleet, self._ingress, self.url = fleet, ingress, url

    def held(self) -> dict[str, Any]:
        """How long the ingress's event loop was held since the last call: `figures`, and the `stacks` that held it."""
        return self._ingress.ask({"ask": "held"})

    def left(self, settle_s: float) -> dict[str, Any]:
        """What is still open when nothing is asked any more, by name, after `settle_s` seconds at most."""
        ingress = self._ingress.ask({"ask": "left", "settle_s": settle_s})
        return {**ingress, **self._fleet.ask({"ask": "left", "settle_s": settle_s})}


@contextlib.contextmanager
def apart(config: BatonConfig, replica_ids: tuple[str, ...], useless_grammar: str | None = None) -> Iterator[Apart]:
    """Start both. `useless_grammar`: as engines have it (`GatedEngine`)."""
    with child(__name__, "fleet") as fleet, child(__name__, "ingress") as ingress:
        dumped = config.model_dump(mode="json")
        where = fleet.ask({"config": dumped, "replicas": replica_ids, "useless_grammar": useless_grammar})
        yield Apart(fleet, ingress, ingress.ask({"config": dumped, **where})["url"])


# ---- the fleet: the session manager and the replicas


async def _fleet(parent: Parent, asked: dict[str, Any]) -> None:
    config = BatonConfig.model_validate(asked["config"])
    async with contextlib.AsyncExitStack() as stack:
        with starting():
            cluster = await stack.enter_async_context(in_process(config, tuple(asked["replicas"])))
        for engine in cluster.engines.values():
            engine.useless_grammar = asked["useless_grammar"]
        manager = ManagerServer(cluster.manager, SECRET)
        await manager.start(HOST)

        async def answering(message: dict[str, Any]) -> dict[str, Any]:
            for pool in cluster.pools.values():
                pool.tasks.clear()
            return await cluster.left(message["settle_s"])

        parent.say({"manager": manager.address, "replicas": cluster.fleet.addresses})
        await parent.answer(answering)
        await manager.retire()


# ---- the ingress


async def _ingress(parent: Parent, asked: dict[str, Any]) -> None:
    config = BatonConfig.model_validate(asked["config"])
    async with contextlib.AsyncExitStack() as stack:
        with starting():  # as every process of the application starts
            server, url = await stack.enter_async_context(_serving(config, asked["manager"], asked["replicas"]))
        watch, tasks = LoopWatch(), len(asyncio.all_tasks())

        async def answering(message: dict[str, Any]) -> dict[str, Any]:
            if message["ask"] == "held":
                figures, stacks = watch.take()
                return {"figures": figures, "stacks": stacks}
            return await _left(server, tasks, message["settle_s"])

        parent.say({"url": url})
        await parent.answer(answering)
        watch.close()


@contextlib.asynccontextmanager
async def _serving(config: BatonConfig, manager: str, replicas: dict[str, str]) -> AsyncIterator[tuple[Served, str]]:
    """The ingress behind the web server that Serve gives it, and its URL."""

    async def locate() -> str:
        return manager

    async def find(replica: ReplicaInfo, task: SessionTask) -> str:
        if replica.replica_id not in replicas:
            raise ReplicaLost(f"there is no {replica.replica_id}")
        return replicas[replica.replica_id]

    client, control = (ManagerClient(locate, SECRET) for _ in range(2))
    links = Links(find, SECRET, config.placement.ingress_lease_s)
    stand_in = StandIn(client, config, control=control)
    core = core_between(config, stand_in, links, Limits(config.placement.max_attempts))
    async with serving(config, core, stand_in) as served:
        access_log.start()
        port = free_port()
        settings = uvicorn.Config(
            served.gateway,
            HOST,
            port,
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_keep_alive=600,  # by default 5 s: a client that stands still for so long meets a closed connection
        )
        web = uvicorn.Server(settings)
        task = asyncio.create_task(web.serve())
        while not web.started:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        yield served, f"http://{HOST}:{port}"
        web.should_exit = True
        await task
    client.shutdown()
    control.shutdown()


async def _left(server: Served, tasks: int, settle_s: float) -> dict[str, Any]:
    """Sessions and tasks that are more than at the start. The server's own tasks for open connections go with them."""

    async def look() -> dict[str, Any]:
        now = {
            "ingress_sessions": server.core.open_sessions,
            "frontend_requests": server.llm.get_num_unfinished_requests(),
            "ingress_tasks": max(0, len(asyncio.all_tasks()) - tasks),
        }
        return {name: count for name, count in now.items() if count}

    return await left_after(settle_s, look)


def main(kind: str) -> None:
    """One of the two processes."""
    parent = Parent()
    asyncio.run({"fleet": _fleet, "ingress": _ingress}[kind](parent, parent.first()))


if __name__ == "__main__":
    main(sys.argv[1])
