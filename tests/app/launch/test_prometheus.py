"""Prometheus beside a Ray of our own, with a double of its binary: how it is found, how it starts and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from ray.dashboard.modules.metrics.metrics_head import METRICS_OUTPUT_ROOT_ENV_VAR, PROMETHEUS_HOST_ENV_VAR
from ray.dashboard.modules.metrics.templates import PROMETHEUS_YML_TEMPLATE

from app.launch import prometheus as module
from app.launch.config import LaunchError
from app.launch.launcher import main
from app.launch.ports import free_port, port_answers
from app.launch.prometheus import ALERTS, HOST, VARIABLE, Prometheus, scrape_configuration

SCRAPE = PROMETHEUS_YML_TEMPLATE.format(prom_metrics_service_discovery_file_path="/tmp/ray/session/found.json")
DOUBLE = f"""#!{sys.executable}
import http.server, json, pathlib, sys
options = dict(each.split("=", 1) for each in sys.argv[1:])
pathlib.Path(__file__).with_name("options.json").write_text(json.dumps(options))
pathlib.Path(options["--storage.tsdb.path"]).mkdir()
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
host, port = options["--web.listen-address"].split(":")
http.server.HTTPServer((host, int(port)), Ready).serve_forever()
"""


@pytest.fixture
def scrape(tmp_path: Path) -> Path:
    file = tmp_path / "rays.yml"
    file.write_text(SCRAPE)
    return file


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The double of Prometheus's binary. It writes its options beside itself."""
    file = tmp_path / "prometheus"
    file.write_text(DOUBLE)
    file.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(file))
    return file


def folder_of(double: Path) -> Path:
    options = json.loads(double.with_name("options.json").read_text())
    return Path(options["--config.file"]).parent


def test_without_prometheus_nothing_starts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/prometheus")
    monkeypatch.setattr("app.launch.interrupts.signal.signal", lambda *handler: None)
    ports = ["--port", str(free_port(HOST)), "--ray-port", str(free_port(HOST)), "--dashboard-port"]
    assert main(["--config", "configs/mock.yaml", "--observe", *ports, str(free_port(HOST))]) == 1
    said = capsys.readouterr()
    assert "there is no /nowhere/prometheus: install it" in said.err
    assert "starting Ray" not in said.out


def test_it_is_for_a_ray_of_our_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.launch.launcher.port_answers", lambda *where: True)
    monkeypatch.setattr("app.launch.serve_api.ServeApi.answers", lambda api: True)
    monkeypatch.setattr("app.launch.interrupts.signal.signal", lambda *handler: None)
    assert main(["--config", "configs/mock.yaml", "--observe", "--port", str(free_port(HOST))]) == 1
    assert PROMETHEUS_HOST_ENV_VAR in capsys.readouterr().err


def test_its_port_is_its_own(double: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port(HOST)
    with pytest.raises(LaunchError, match=f"{port} is busy"):
        Prometheus(port, {port})
    monkeypatch.setattr(module, "PORT", port)
    assert Prometheus().url == f"http://{HOST}:{port}"
    assert Prometheus(taken={port}).url != f"http://{HOST}:{port}"
    assert Prometheus(port).environment == {PROMETHEUS_HOST_ENV_VAR: f"http://{HOST}:{port}"}


def test_ray_writes_where_we_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/somewhere")
    assert scrape_configuration("session_1") == Path("/somewhere/ray/session_1/metrics/prometheus/prometheus.yml")
    monkeypatch.setenv(METRICS_OUTPUT_ROOT_ENV_VAR, "/elsewhere")
    assert scrape_configuration("session_1") == Path("/elsewhere/prometheus/prometheus.yml")


@pytest.mark.slow
def test_it_scrapes_as_ray_says_with_our_alerts_and_its_data_goes_away_with_it(
    double: Path, scrape: Path, tmp_path: Path
) -> None:
    prometheus = Prometheus(port := free_port(HOST))
    prometheus.start(scrape, tmp_path / "log")
    try:
        folder = folder_of(double)
        written = yaml.safe_load((folder / "prometheus.yml").read_text())
        assert written == yaml.safe_load(SCRAPE) | {"rule_files": [str(ALERTS)]}
        assert ALERTS.is_file()
        assert (folder / "data").is_dir()
        assert port_answers(HOST, port)
        assert not prometheus.has_ended
    finally:
        prometheus.stop()
    assert prometheus.has_ended
    assert not folder.exists()
    assert not port_answers(HOST, port)
    prometheus.stop()


@pytest.mark.slow
def test_one_that_ends_at_once_is_an_error_with_its_log(double: Path, scrape: Path, tmp_path: Path) -> None:
    double.write_text("#!/bin/sh\nexit 3\n")
    prometheus = Prometheus(free_port(HOST))
    with pytest.raises(LaunchError, match=f"does not answer at .*; see {tmp_path / 'log'}"):
        prometheus.start(scrape, tmp_path / "log")
    prometheus.stop()


def test_a_ray_that_writes_no_configuration_is_an_error(
    double: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.0)
    (empty := tmp_path / "rays.yml").touch()
    prometheus = Prometheus(free_port(HOST))
    for missing in (empty, tmp_path / "none"):
        with pytest.raises(LaunchError, match=f"has not written {missing}"):
            prometheus.start(missing, tmp_path / "log")
    prometheus.stop()


_OWNER = """
import sys, time
from pathlib import Path
from app.launch.prometheus import Prometheus
Prometheus(int(sys.argv[1])).start(Path(sys.argv[2]), Path(sys.argv[3]))
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_it_ends_when_its_launcher_is_killed(double: Path, scrape: Path, tmp_path: Path) -> None:
    port = free_port(HOST)
    command = [sys.executable, "-c", _OWNER, str(port), str(scrape), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        folder = folder_of(double)
        assert folder.exists()
        owner.kill()
    deadline = time.monotonic() + 60.0
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    assert not port_answers(HOST, port)
