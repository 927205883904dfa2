"""A driver on the application's Ray, `RAY_ADDRESS` in its environment, that has replicas let their sessions go.

Its arguments are pools. For every line of its input, the name of one of them, it prints how many sessions go from the
replicas of the pool.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import ray
from ray import serve

from app.launch.local_ray import LOOPBACK_ONLY
from load_tests.harness.application import ROOT
from tests.e2e.cluster import Cluster


class Mover:
    """The driver, for a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._asked, self._told = process.stdin, process.stdout
        assert self._told.readline().strip() == "ready"

    def let_go(self, pool: str) -> int:
        """Have all replicas of a pool let all their sessions go; how many those were."""
        self._asked.write(f"{pool}\n")
        self._asked.flush()
        return int(self._told.readline())


@contextlib.contextmanager
def mover_of(cluster: Cluster, *pools: str) -> Iterator[Mover]:
    """A driver for these pools of an application."""
    command = [sys.executable, "-m", "tests.e2e.mover", *pools]
    variables = os.environ | LOOPBACK_ONLY | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.application.ray_address}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Mover(process)
        finally:
            process.kill()


def main(pools: list[str]) -> None:
    ray.init(log_to_driver=False)
    handles = {pool: serve.get_deployment_handle(pool, "baton") for pool in pools}
    for handle in handles.values():
        handle.counters.remote().result(timeout_s=60)  # Serve tells a new handle about its replicas
    print("ready", flush=True)
    for line in sys.stdin:
        print(sum(handles[line.strip()].broadcast("move_out").results(timeout_s=60)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
