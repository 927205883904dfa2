"""`serve run`, as its users type it: on a Ray of two CPUs, and on a machine where a `make serve` was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from app.launch.current_cluster import current_cluster_file
from app.launch.local_ray import LOOPBACK_ONLY, start_command
from app.launch.ports import RayPorts, free_port
from load_tests.harness.application import ROOT, Application
from tests.e2e.cluster import MARKER, RAY_IS_SLOW, RAY_STARTS, processes

HOST, TWO = "127.0.0.1", 2
READY_WITHIN_S, END_WITHIN_S = 480.0, 60.0
GONE_WITHIN_S = 240.0
"""Ray's agents ask a GCS that has ended for a minute before they end."""
pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A machine of this test's own, as far as Ray can tell: a folder without clusters. Every process is ended."""
    marker = uuid.uuid4().hex
    ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # Not pytest's folder: paths of sockets may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        try:
            yield ours | LOOPBACK_ONLY | {"RAY_TMPDIR": folder, MARKER: marker}
        finally:
            deadline = time.monotonic() + GONE_WITHIN_S
            while (left := processes(marker)) and time.monotonic() < deadline:
                time.sleep(0.2)
            kill(left)
    assert not left, f"processes outlived their Ray: {left}"


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def mock_configuration(port: int) -> dict[str, object]:
    serve: dict[str, object] = yaml.safe_load((ROOT / "configs" / "mock.yaml").read_text())
    return serve | {"http_options": {"host": HOST, "port": port}}


@contextlib.contextmanager
def running(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command; Ctrl-C at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_WITHIN_S)


def serve_run_until_ready(environment: Mapping[str, str], directory: Path) -> None:
    """`serve run FILE`, without an address, until GET /ready answers 200. Run again where its own Ray is slow."""
    port, log = free_port(HOST), directory / "serve-run.log"
    file = directory / "serve-run.yaml"
    file.write_text(yaml.safe_dump(mock_configuration(port)))
    ready = partial(_is_ready, f"http://{HOST}:{port}/ready")
    for _ in range(RAY_STARTS):
        with running([sys.executable, "-m", "ray.serve.scripts", "run", str(file)], environment, log) as process:
            if happens(ready, process, log):
                return
            kill(processes(environment[MARKER]))
    pytest.fail(f"Ray did not start in {RAY_STARTS} tries: {log.read_text()[-4000:]}")


def happens(event: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait for an event. False where the process has ended because Ray gives a node only 30 s to register."""
    deadline = time.monotonic() + READY_WITHIN_S
    while not event():
        if process.poll() is not None and RAY_IS_SLOW in log.read_text():
            return False
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)
    return True


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def test_it_is_ready_on_a_fresh_ray_of_two_cpus(environment: dict[str, str], tmp_path: Path) -> None:
    ports, log = RayPorts(HOST, free_port(HOST), free_port(HOST)), tmp_path / "ray.log"
    for _ in range(RAY_STARTS):
        with running(start_command(ports, TWO), environment, log) as ray:
            if happens(current_cluster_file().exists, ray, log):
                serve_run_until_ready(environment, tmp_path)
                return
            kill(processes(environment[MARKER]))
    pytest.fail(f"Ray did not start in {RAY_STARTS} tries: {log.read_text()[-4000:]}")


def test_it_is_ready_after_a_make_serve_that_was_killed(environment: dict[str, str], tmp_path: Path) -> None:
    application = Application(mock_configuration(8000), tmp_path, environment)
    try:
        application.wait()
        assert current_cluster_file().read_text() == application.ray_address
    finally:
        application.kill()
    deadline = time.monotonic() + END_WITHIN_S
    while current_cluster_file().exists():
        assert time.monotonic() < deadline, "the guard did not remove Ray's file"
        time.sleep(0.1)
    serve_run_until_ready(environment, tmp_path)
