"""Prometheus beside a Ray of our own: it scrapes what Ray exports, and ends with the launcher. Does not import ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.launch.config import LaunchError
from app.launch.current_cluster import current_cluster_file
from app.launch.guard import Guard
from app.launch.local_ray import die_with_parent
from app.launch.ports import free_port, port_is_free

VARIABLE = "BATON_PROMETHEUS"
"""Names the binary. Without it, `prometheus` is looked for where commands are."""
HOST, PORT = "127.0.0.1", 9090
ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yaml"
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 10.0
_MARK = "BATON_PROMETHEUS_RUN"  # in the environment of the process, so that its guard finds it
_MOST_DATA = "1GB"


class Prometheus:
    """One Prometheus. `port`: None: `PORT`, or another where that is busy. `taken`: ports that it may not have.

    Raises LaunchError where there is no binary, or the port is busy.
    """

    def __init__(self, port: int | None = None, taken: Collection[int] = ()) -> None:
        self._binary = _binary()
        if port is not None and (port in taken or not port_is_free(HOST, port)):
            raise LaunchError(f"the port {port} is busy; choose another PROMETHEUS_PORT")
        is_free = PORT not in taken and port_is_free(HOST, PORT)
        self._port = port or (PORT if is_free else free_port(HOST, taken))
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._log = Path(os.devnull)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variable that tells Ray's dashboard, and the Grafana configuration that Ray writes, where it is."""
        return {"RAY_PROMETHEUS_HOST": self.url}

    def start(self, scrape: Path, log: Path) -> None:
        """Start it and wait until it answers. `scrape`: the configuration that Ray writes, which may yet have to come.

        It has Baton's alerts as well. Its data is in a folder that goes away with it, also when this process is killed.
        Raises LaunchError when it ends, or does not answer within `START_TIMEOUT_S`.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while (rays := _configuration(scrape)) is None:
            if time.monotonic() > deadline:
                raise LaunchError(f"Ray has not written {scrape}, which says what Prometheus scrapes")
            time.sleep(0.2)
        self._log, mark = log, uuid.uuid4().hex
        folder = Path(tempfile.mkdtemp(prefix="baton-prometheus-"))
        self._guard = Guard(f"{_MARK}={mark}", folder)
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(rays | {"rule_files": [str(ALERTS)]}))
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--storage.tsdb.retention.size={_MOST_DATA}",
                    f"--web.listen-address={HOST}:{self._port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {_MARK: mark},
                start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone
                preexec_fn=die_with_parent,
            )
        while not self._answers():
            if self.has_ended or time.monotonic() > deadline:
                raise LaunchError(f"Prometheus does not answer at {self.url}; see {log}")
            time.sleep(0.2)

    @property
    def has_ended(self) -> bool:
        """Whether it was started and has ended."""
        return self._process is not None and self._process.poll() is not None

    @property
    def log(self) -> Path:
        """Where it writes what it does."""
        return self._log

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it, if it was started, and remove its data. After `timeout_s` it is killed."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._guard is not None:
            self._guard.close()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5.0, trust_env=False).is_success
        except httpx.HTTPError:
            return False


def _configuration(scrape: Path) -> dict[str, Any] | None:
    """What the file says; None while it is not written."""
    written = yaml.safe_load(scrape.read_text()) if scrape.is_file() else None
    return written if isinstance(written, dict) and "scrape_configs" in written else None


def scrape_configuration(session: str) -> Path:
    """Where Ray writes what Prometheus is to scrape (`ray/dashboard/modules/metrics`). `session`: its name."""
    root = os.environ.get("RAY_METRICS_OUTPUT_ROOT") or current_cluster_file().parent / session / "metrics"
    return Path(root) / "prometheus" / "prometheus.yml"


def _binary() -> str:
    named = os.environ.get(VARIABLE) or "prometheus"
    if (found := shutil.which(named)) is None:
        raise LaunchError(
            f"OBSERVE needs Prometheus, and there is no {named}: install it (Debian's package is `prometheus`), name a "
            f"binary by {VARIABLE}, or serve without OBSERVE"
        )
    return found
