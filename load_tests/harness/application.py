"""A whole Baton for a benchmark or a test, started as a user starts it, on its own ports, and ended by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from app.launch import ports
from load_tests.harness.processes import Guard

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 150.0


class NotStarted(Exception):
    """The application did not come up; the message ends with its log."""


class Application:
    """A running Baton.

    `serve`: the content of a `serve run` file. `directory`: the folder for that file and the log, `launch.log`.
    `environment`: variables for all its processes, in addition to this process's own. `ray`: the ports of GCS and
    dashboard of a Ray that runs on this machine; the application joins it and leaves it running. Without `ray` it has a
    Ray of its own. `options`: more options for the launcher. The caller that makes one stops it; where the
    caller is killed first, a guard does.
    """

    def __init__(
        self,
        serve: Mapping[str, Any],
        directory: Path,
        environment: Mapping[str, str] | None = None,
        ray: tuple[int, int] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        path = directory / "serve.yaml"
        path.write_text(yaml.safe_dump(dict(serve)))
        port, (ray_port, dashboard_port) = free_port(), ray or (free_port(), free_port())
        self.url, self.dashboard_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}"
        self.ray_address = f"127.0.0.1:{ray_port}"
        self.log = directory / "launch.log"
        command = [sys.executable, "-m", "app.launch", "--config", str(path), "--port", str(port)]
        command += ["--ray-port", str(ray_port), "--dashboard-port", str(dashboard_port), *options]
        if ray is not None:
            command += ["--ray-address", self.ray_address]
        ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=ours | dict(environment or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = Guard()
        self._guard.watch([self._process.pid])

    def wait(self) -> None:
        """Wait until it says that it is ready. Raises NotStarted when it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ready in" not in self.log.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NotStarted(f"the application did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        """Send Ctrl-C, as a user would; idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        self._guard.close()

    def kill(self) -> None:
        """Send SIGKILL to the launcher alone, which then cleans up nothing itself."""
        self._process.kill()
        self._process.wait(10)
        self._guard.close()


def free_port() -> int:
    """A free TCP port of the loopback interface, see `app.launch.ports.free_port`."""
    return ports.free_port("127.0.0.1")
