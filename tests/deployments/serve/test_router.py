"""The placed router under real Serve: a call lands where its placement says, or fails soon and clearly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle

from deployments.errors import ReplicaGone, ReplicaLost
from deployments.messages import Locate
from deployments.serve.router import PlacedRouter

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]

APPEAR_S = 15.0
BEGUN = ".begun"


class Echo:
    """Says which replica it is."""

    def __init__(self) -> None:
        self.replica_id: str = serve.get_replica_context().replica_id.unique_id

    async def run(self, asked: Locate, hold_s: float = 0.0) -> str:
        await asyncio.sleep(hold_s)
        return self.replica_id

    async def run_until(self, asked: Locate, path: str) -> str:
        """Answers when there is such a file. Another one, with the suffix `BEGUN`, says that this has begun."""
        await asyncio.to_thread(Path(path).with_suffix(BEGUN).touch)
        while not await asyncio.to_thread(Path(path).exists):
            await asyncio.sleep(0.1)
        return self.replica_id

    async def name(self) -> str:
        return self.replica_id

    async def die(self, asked: Locate) -> None:
        ray.kill(ray.get_runtime_context().current_actor)
        await asyncio.sleep(60)


class Front:
    """Makes several placed calls within one request: they share that request's id."""

    def __init__(self, echo: DeploymentHandle) -> None:
        self.echo = echo

    async def fan_out(self, calls: list[Locate]) -> list[str]:
        return list(await asyncio.gather(*(self.echo.run.remote(asked) for asked in calls)))


def named(replica_id: str, number: int = 0) -> Locate:
    return Locate(replica_id, f"s{number}")


def start_ray() -> None:
    """Ray ends itself when a process of its own is slow to start, so it has three tries."""
    for tries_left in (2, 1, 0):
        try:
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        except Exception:
            ray.shutdown()
            if not tries_left:
                raise
        else:
            return


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    start_ray()
    serve.start(http_options={"location": "NoServer"})
    yield
    serve.shutdown()
    ray.shutdown()


def placed_echo(**options: Any) -> serve.Deployment:
    router = RequestRouterConfig(request_router_class=PlacedRouter, request_router_kwargs={"appear_s": APPEAR_S})
    options = {"num_replicas": 2, "max_ongoing_requests": 1000, **options}
    return serve.deployment(Echo, ray_actor_options={"num_cpus": 0.1}, request_router_config=router, **options)


def deploy(name: str, **options: Any) -> DeploymentHandle:
    return serve.run(placed_echo(**options).bind(), name=name, route_prefix=None)


@pytest.fixture(scope="module")
def echo(cluster: None) -> DeploymentHandle:
    return deploy("echo")


@pytest.fixture
async def names(echo: DeploymentHandle) -> list[str]:
    return await both_of(echo)


async def both_of(echo: DeploymentHandle) -> list[str]:
    found: set[str] = set()
    async with asyncio.timeout(60):
        while len(found) < 2:
            found.add(await echo.name.remote())
    return sorted(found)


async def test_each_of_200_concurrent_calls_lands_on_the_replica_it_names(
    echo: DeploymentHandle, names: list[str]
) -> None:
    wanted = [names[number % 3 % 2] for number in range(200)]
    landed = await asyncio.gather(*(echo.run.remote(named(name, number), 0.05) for number, name in enumerate(wanted)))
    assert list(landed) == wanted


async def test_calls_that_share_a_request_id_are_not_mixed_up(cluster: None) -> None:
    front = serve.deployment(Front, ray_actor_options={"num_cpus": 0.1})
    handle = serve.run(front.bind(placed_echo().bind()), name="front", route_prefix=None)
    both = await both_of(serve.get_deployment_handle("Echo", "front"))
    wanted = [both[number % 2] for number in range(60)]
    calls = [named(name, number) for number, name in enumerate(wanted)]
    assert await asyncio.wait_for(handle.fan_out.remote(calls), 120) == wanted
    serve.delete("front")


async def test_a_call_that_names_an_unknown_replica_fails_and_holds_up_no_other(
    echo: DeploymentHandle, names: list[str]
) -> None:
    lost = [asyncio.ensure_future(_result(echo, named("unknown", number))) for number in range(20)]
    assert await echo.run.remote(named(names[0])) == names[0]
    assert not any(failure.done() for failure in lost)
    async with asyncio.timeout(APPEAR_S + 60):
        for failure in lost:
            with pytest.raises(ReplicaLost, match="Serve knows no replica unknown of Echo"):
                await failure


async def test_a_full_replica_refuses_and_the_call_is_not_sent_elsewhere(cluster: None, tmp_path: Path) -> None:
    handle = deploy("full", max_ongoing_requests=1)
    name = await handle.name.remote()
    released = tmp_path / "released"
    first = asyncio.ensure_future(_held(handle, named(name, 1), released))
    async with asyncio.timeout(120):
        while not released.with_suffix(BEGUN).exists():
            if first.done() and first.exception():  # the call before still had the place
                first = asyncio.ensure_future(_held(handle, named(name, 1), released))
            await asyncio.sleep(0.1)
        error = await _failure(handle, named(name, 2))
    assert "refused session s2" in str(error)
    assert not first.done()
    released.touch()
    assert await first == name
    serve.delete("full")


async def test_a_call_to_a_replica_that_died_fails_even_when_no_replica_is_left(cluster: None) -> None:
    handle = deploy("mortal", num_replicas=1)
    name = await handle.name.remote()
    async with asyncio.timeout(120):
        with pytest.raises((ActorDiedError, ReplicaLost)):  # Serve may try again before the call is told of the death
            await handle.die.remote(named(name))
        with pytest.raises(ReplicaLost, match=f"replica {name} of session s0 is gone"):
            await handle.run.remote(named(name))
    serve.delete("mortal")


async def test_a_replica_that_serve_has_taken_out_gets_only_what_hands_over_a_session(
    cluster: None, tmp_path: Path
) -> None:
    stays_long = {"graceful_shutdown_timeout_s": 300.0}  # Serve kills a replica whose calls take longer
    handle = deploy("shrinking", **stays_long)
    names = await both_of(handle)
    released = tmp_path / "released"
    held = [asyncio.ensure_future(_held(handle, named(name), released)) for name in names]
    await asyncio.sleep(0)  # they are sent
    for name in names:  # each has begun what it was called for before
        await handle.run.remote(named(name))
    deploying = asyncio.create_task(asyncio.to_thread(deploy, "shrinking", num_replicas=1, **stays_long))
    async with asyncio.timeout(120):
        while not (gone := [name for name in names if isinstance(await _failure(handle, named(name)), ReplicaGone)]):
            await asyncio.sleep(0.1)
    assert await handle.run.remote(replace(named(gone[0]), hands_over=True)) == gone[0]
    released.touch()
    assert sorted(await asyncio.gather(*held)) == names
    await deploying
    serve.delete("shrinking")


async def test_a_cancelled_call_leaves_nothing_waiting(echo: DeploymentHandle, names: list[str]) -> None:
    response = echo.run.remote(named("unknown"))
    await asyncio.sleep(0.05)
    response.cancel()
    with pytest.raises((asyncio.CancelledError, RequestCancelledError)):
        await response
    assert await echo.run.remote(named(names[1])) == names[1]


async def test_each_of_many_placed_calls_at_once_reaches_its_replica(echo: DeploymentHandle, names: list[str]) -> None:
    placed = [names[number % len(names)] for number in range(200)]
    answers = await asyncio.gather(*(_result(echo, named(name, number)) for number, name in enumerate(placed)))
    assert answers == placed


async def _failure(handle: DeploymentHandle, asked: Locate) -> Exception | None:
    try:
        await handle.run.remote(asked)
    except ReplicaLost as error:
        return error
    return None


async def _result(handle: DeploymentHandle, asked: Locate, hold_s: float = 0.0) -> str:
    return str(await handle.run.remote(asked, hold_s))


async def _held(handle: DeploymentHandle, asked: Locate, released: Path) -> str:
    return str(await handle.run_until.remote(asked, str(released)))
