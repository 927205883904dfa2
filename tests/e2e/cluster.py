"""A whole Baton for tests, started as a user starts it, on ports of its own, and stopped to its last process."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from load_tests.application import ROOT, Application, NotStarted

MARKER = "BATON_TEST_RUN"


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
        answer: dict[str, Any] = httpx.get(f"{self.url}/baton/status", timeout=10).json()
        return answer

    def settled(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """The status once nothing is open and every replica has counted its last session."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            first = self.status()
            time.sleep(1.2)  # replicas count within a heartbeat of falling idle
            second = self.status()
            if not second["sessions"]["open"] and _counters(first) == _counters(second):
                return second
        raise AssertionError(f"the cluster did not settle: {self.status()}")

    def used_blocks(self) -> int:
        return sum(replica["used_blocks"] for replica in self.status()["replicas"].values())


def _counters(status: dict[str, Any]) -> dict[str, Any]:
    return {name: replica["counters"] for name, replica in status["replicas"].items()}


def total(status: dict[str, Any], role: str, counter: str, pool: str | None = None) -> float:
    """A counter summed over a role's replicas, or over one pool's."""
    replicas = status["replicas"].values()
    chosen = [r for r in replicas if r["role"] == role and pool in (None, r["pool"])]
    return float(sum(replica["counters"].get(counter, 0) for replica in chosen))


def start(config: str, directory: Path) -> Cluster:
    """Start a configuration with `app.launch`, as `make serve` does, and wait until it says that it is ready."""
    serve = yaml.safe_load((ROOT / "configs" / config).read_text())
    arguments = serve["applications"][0]["args"]
    trace_dir = directory / "trace"
    arguments.setdefault("channel", {})["trace_dir"] = str(trace_dir)
    marker = uuid.uuid4().hex
    application = Application(serve, directory, {MARKER: marker})
    try:
        application.wait()
    except NotStarted:
        application.stop()
        raise
    return Cluster(application.url, application.dashboard_url, trace_dir, application, marker)


def stop(cluster: Cluster) -> list[str]:
    """Ctrl-C, as a user would; the command lines of what is left of its processes afterwards."""
    cluster.application.stop()
    return list(processes(cluster.marker).values())


def processes(marker: str) -> dict[int, str]:
    """Live processes that inherited the run's environment: their command lines by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARKER}={marker}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return {pid: line for pid, line in found.items() if line}
