"""A whole Baton for tests, started as a user starts it, on ports of its own, and stopped to its last process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.launch.serve_api import ServeApi
from load_tests.harness.application import ROOT, Application
from load_tests.harness.processes import marked

PATIENCE_S = 60.0  # with a dashboard that says nothing

RAY_STARTS, RAY_IS_SLOW = 3, "timed out during startup"
"""What Ray says of a node that did not register within its 30 s, and how often a test starts such a node."""
MARKER = "BATON_TEST_RUN"
NAME = "baton"


@dataclass
class Cluster:
    """A running application. `trace_dir`: where its workers write their timelines. `marker` is in the environment of
    every process of it."""

    url: str
    dashboard_url: str
    trace_dir: Path
    application: Application
    marker: str

    def status(self) -> dict[str, Any]:
        """The status. A session manager that does not answer in its time is asked again."""
        deadline = time.monotonic() + PATIENCE_S
        while (answer := httpx.get(f"{self.url}/baton/status", timeout=PATIENCE_S)).status_code != httpx.codes.OK:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.05)
        found: dict[str, Any] = answer.json()
        return found

    def settled(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """The status once nothing is open, no block is used, and every replica has counted its last session.

        A replica counts before it reports that it is idle. Its first report may be from before that.
        """
        deadline = time.monotonic() + timeout_s
        begun: dict[str, int] = {}
        while time.monotonic() < deadline:
            status = self.status()
            versions = {name: replica["version"] for name, replica in status["replicas"].items()}
            if status["sessions"]["open"] or _used(status):
                begun = {}
            elif begun.keys() != versions.keys():
                begun = versions
            elif all(versions[name] >= begun[name] + 2 for name in versions):
                return status
            time.sleep(0.05)
        raise AssertionError(f"the cluster did not settle: {self.status()}")

    def deploy(self, change: Callable[[dict[str, Any]], None]) -> None:
        """`serve deploy` of what is running, with a change to its one application; returns when that is accepted."""
        api = ServeApi(self.dashboard_url)
        details = api.details_within(PATIENCE_S)
        application = details["applications"][NAME]["deployed_app_config"]
        change(application)
        api.deploy(
            {name: details[name] for name in ("proxy_location", "http_options")} | {"applications": [application]}
        )

    def running(self) -> dict[str, set[str]]:
        """Every deployment's replicas by actor name; empty while an update or anything else is under way."""
        application = ServeApi(self.dashboard_url).details_within(PATIENCE_S)["applications"][NAME]
        deployments = application["deployments"]
        states = {replica["state"] for each in deployments.values() for replica in each["replicas"]}
        if application["status"] != "RUNNING" or states != {"RUNNING"}:
            return {}
        return {name: {replica["actor_name"] for replica in each["replicas"]} for name, each in deployments.items()}

    def pid(self, deployment: str) -> int:
        """The process of a deployment's one replica."""
        title = f"ray::ServeReplica:{NAME}:{deployment}"
        (pid,) = [pid for pid, line in processes(self.marker).items() if line.startswith(title)]
        return pid

    def kill(self, deployment: str) -> None:
        """Kill the process of a deployment's one replica."""
        os.kill(self.pid(deployment), signal.SIGKILL)

    def decoding(self, count: int) -> bool:
        """Whether so many sessions are placed, and the prefill of each is over."""
        promises = self.status()["promises"]
        return len(promises) == count and not any(promise["prefilling"] for promise in promises)

    def used_blocks(self) -> int:
        return _used(self.status())


def _used(status: dict[str, Any]) -> int:
    return sum(replica["used_blocks"] for replica in status["replicas"].values())


def total(status: dict[str, Any], role: str, counter: str, pool: str | None = None) -> float:
    """A counter summed over a role's replicas, or over one pool's."""
    replicas = status["replicas"].values()
    chosen = [r for r in replicas if r["role"] == role and pool in (None, r["pool"])]
    return float(sum(replica["counters"].get(counter, 0) for replica in chosen))


@contextlib.contextmanager
def started(
    config: str, directory: Path, options: Sequence[str] = (), more: Mapping[str, Any] | None = None, **placement: Any
) -> Iterator[Cluster]:
    """Start a configuration with `app.launch`, as `make serve` does, and wait until it says that it is ready. At the
    end Ctrl-C, as a user would; fails where one of its processes is left afterwards.

    `options`: more for the launcher. `more`: settings of other sections, by section, and keys that are no section.
    `placement`: settings of that section to change.
    """
    serve = yaml.safe_load((ROOT / "configs" / config).read_text())
    arguments = serve["applications"][0]["args"]
    trace_dir = directory / "trace"
    arguments.setdefault("channel", {})["trace_dir"] = str(trace_dir)
    for section, settings in {**(more or {}), "placement": placement}.items():
        arguments[section] = arguments.get(section, {}) | settings if isinstance(settings, dict) else settings
    marker = uuid.uuid4().hex
    application = Application(serve, directory, {MARKER: marker}, options=options)
    try:
        application.wait()
        yield Cluster(application.url, application.dashboard_url, trace_dir, application, marker)
    finally:
        application.stop()
    left = list(processes(marker).values())
    assert not left, f"processes outlived the application: {left}"


def processes(marker: str) -> dict[int, str]:
    """Live processes that inherited the run's environment: their command lines by process id."""
    return marked(f"{MARKER}={marker}")


def engines(cluster: Cluster) -> list[int]:
    """The processes of its engines."""
    return [pid for pid, line in processes(cluster.marker).items() if line.startswith("VLLM::EngineCore")]
