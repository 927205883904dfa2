"""The launcher's parts that need no Ray: configuration, progress, the Serve client, processes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.launch import launcher as launch
from app.launch.config import (
    LaunchError,
    base_url,
    cpus_needed,
    curl_line,
    load_config,
    model_of,
    parse_address,
    with_model,
)
from app.launch.local_ray import start_command
from app.launch.ports import RayPorts, free_port, port_answers, port_is_free
from app.launch.serve_api import ServeApi, ServeApiError, progress
from configs.schema import BatonConfig

ARGUMENTS = {"prefill": {"engine": {"kind": "mock"}}, "decode": {"main": {"engine": {"kind": "mock"}}}}


def write(path: Path, **changes: Any) -> Path:
    application = {"name": "baton", "route_prefix": "/", "import_path": "app.main:build", "args": ARGUMENTS}
    config = {"proxy_location": "HeadOnly", "applications": [application]} | changes
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return write(tmp_path / "config.yaml", http_options={"host": "0.0.0.0", "port": 9000, "root_path": "/x"})


def test_the_port_is_overridden_and_the_rest_stays(config_path: Path) -> None:
    config = load_config(config_path, 8123)
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8123, "root_path": "/x"}
    assert load_config(config_path, None)["http_options"]["port"] == 9000
    assert base_url(config) == "http://127.0.0.1:8123"


def test_http_options_have_loopback_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "c.yaml"), None)
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}


def test_the_model_source_becomes_the_checkpoint(config_path: Path) -> None:
    config = load_config(config_path, None)
    changed = with_model(config, "/checkpoint")
    assert model_of(changed).model.source == "/checkpoint"
    assert model_of(changed).model.name == model_of(config).model.name
    assert "model" not in config["applications"][0]["args"], "the original is left alone"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "is not YAML"),
        ("[]", "exactly one entry"),
        ("applications: []", "exactly one entry"),
        ("applications: [{args: {prefil: {}}}]", "is not valid"),
    ],
)
def test_a_wrong_configuration_says_why(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(LaunchError, match=reason):
        load_config(path, None)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot read"):
        load_config(tmp_path / "none.yaml", None)


def test_the_curl_line_is_a_command_with_a_valid_body() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "m"))
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "m"


def test_addresses() -> None:
    assert parse_address(None, 1, 2) == RayPorts("127.0.0.1", 1, 2)
    assert parse_address("head:6380", 1, 2) == RayPorts("head", 6380, 2)
    for wrong in ("auto", "head:", ":1"):
        with pytest.raises(LaunchError, match="host:port"):
            parse_address(wrong, 1, 2)


def test_ray_starts_on_the_given_ports_without_usage_statistics() -> None:
    command = start_command(RayPorts("127.0.0.1", 6380, 8266), num_cpus=3)
    assert {
        "--port=6380",
        "--dashboard-port=8266",
        "--num-cpus=3",
        "--disable-usage-stats",
        "--block",
    } <= set(command)


def details(status: str, deployment: str, replicas: list[str], message: str = "") -> dict[str, Any]:
    states = [{"state": state} for state in replicas]
    found = {"status": deployment, "message": message, "target_num_replicas": 2, "replicas": states}
    return {"applications": {"baton": {"status": status, "message": "", "deployments": {"prefill": found}}}}


def test_progress_shows_each_change_once() -> None:
    starting = progress(details("DEPLOYING", "UPDATING", ["RUNNING", "STARTING"]), "baton")
    assert starting.changes(None) == [
        "application: DEPLOYING",
        "prefill: UPDATING, 1 of 2 replicas running",
    ]
    assert starting.changes(starting) == []
    running = progress(details("RUNNING", "HEALTHY", ["RUNNING", "RUNNING"]), "baton")
    assert running.changes(starting) == [
        "application: RUNNING",
        "prefill: HEALTHY, 2 of 2 replicas running",
    ]
    assert not running.failed


def test_progress_of_a_failure_holds_the_whole_message_and_shows_its_last_line() -> None:
    failed = progress(details("DEPLOY_FAILED", "DEPLOY_FAILED", [], "Traceback\nValueError: no"), "baton")
    assert failed.failed
    assert failed.parts["prefill"] == "DEPLOY_FAILED, 0 of 2 replicas running (ValueError: no)"
    assert failed.message == "prefill: Traceback\nValueError: no"


def test_progress_before_anything_is_deployed() -> None:
    assert progress({"applications": {}}, "baton").status == "NOT_STARTED"


def test_the_serve_client_reports_refusals_and_silence() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            return httpx.Response(400, text="wrong")
        if request.url.path == "/api/ray/version":
            return httpx.Response(200)
        raise httpx.ConnectError("gone")

    api = ServeApi("http://dashboard", transport=httpx.MockTransport(answer))
    assert api.answers()
    with pytest.raises(ServeApiError, match="400: wrong"):
        api.deploy({})
    with pytest.raises(ServeApiError, match="did not answer GET"):
        api.details()


def test_an_application_is_taken_away_before_serve_is_shut_down() -> None:
    applications: list[dict[str, Any]] = [{"baton": {}}, {"baton": {}}, {}]
    looks = iter(applications)
    asked: list[tuple[str, bytes]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.content))
        return httpx.Response(200, json={"applications": next(looks)} if request.method == "GET" else {})

    api = ServeApi("http://dashboard", transport=httpx.MockTransport(answer))
    assert api.remove({"http_options": {"port": 1}, "applications": [{"name": "baton"}]}, 30.0)
    assert json.loads(asked[0][1]) == {"http_options": {"port": 1}, "applications": []}
    assert [method for method, _ in asked] == ["PUT", "GET", "GET", "GET"]
    looks = iter([{"baton": {}}])
    assert not api.remove({}, -1.0)


def test_an_update_has_logical_cpus_for_successors() -> None:
    def needed(**prefill: Any) -> int:
        pool = {"engine": {"kind": "mock"}}
        return cpus_needed(
            BatonConfig.model_validate(
                {"prefill": {"resources": {"num_cpus": 4}, **pool, **prefill}, "decode": {"d": pool}}
            )
        )

    assert needed(surge_percent=0) == 4 + 2 + 1 + 1
    assert needed() == needed(surge_percent=100) == 2 * 4 + 2 + 1 + 1
    assert needed(replicas=5) == (5 + 2) * 4 + 2 + 1 + 1


def test_a_dashboard_that_wants_a_token_is_not_waited_for() -> None:
    api = ServeApi("http://dashboard", transport=httpx.MockTransport(lambda request: httpx.Response(401)))
    with pytest.raises(ServeApiError, match="token authentication"):
        api.answers()


def test_a_dashboard_that_is_busy_for_a_moment_is_asked_again() -> None:
    answers = iter([httpx.Response(500, text="in trouble"), httpx.Response(200, json={"applications": {}})])
    api = ServeApi("http://dashboard", transport=httpx.MockTransport(lambda request: next(answers)))
    assert api.details_within(30.0) == {"applications": {}}
    answers = iter([httpx.Response(500, text="in trouble")])
    with pytest.raises(ServeApiError, match="500"):
        api.details_within(-1.0)


def test_a_busy_port_is_said_before_anything_starts(
    config_path: Path, capsys: pytest.CaptureFixture[str], signals_restored: None
) -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        assert port_answers("127.0.0.1", port)
        assert launch.main(["--config", str(config_path), "--port", str(port)]) == 1
    assert f"port {port} is busy" in capsys.readouterr().err
    assert port_is_free("127.0.0.1", port)


def test_one_port_for_two_purposes_is_said_before_anything_starts(
    config_path: Path, capsys: pytest.CaptureFixture[str], signals_restored: None
) -> None:
    http, ray = free_port("127.0.0.1"), free_port("127.0.0.1")
    ports = ["--port", str(http), "--ray-port", str(ray), "--dashboard-port", str(ray)]
    assert launch.main(["--config", str(config_path), *ports]) == 1
    assert f"PORT {http}, RAY_PORT {ray} and DASHBOARD_PORT {ray} must be three ports" in capsys.readouterr().err


@pytest.fixture
def signals_restored() -> Any:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


# A head node in miniature: it outlives SIGTERM, and its grandchild has a session of its own.
_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""
_OWNER = f"""
import os, sys, time
from pathlib import Path
from app.launch import local_ray
from app.launch.ports import RayPorts
local_ray.start_command = lambda ports, cpus: [sys.executable, "-c", {_STUBBORN!r}]
log = Path(sys.argv[1])
ray = local_ray.LocalRay(RayPorts("127.0.0.1", 1, 2), 1, log, os.environ)
while "up" not in log.read_text():
    time.sleep(0.05)
print(*ray._descendants(), flush=True)
if sys.argv[2] == "stalled":  # the whole budget is gone before the first look
    local_ray.KILL_TIMEOUT_S = 0.0
if sys.argv[2] != "kill":
    ray.stop(timeout_s=0.5)
else:
    ray.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stop", "stalled", "kill"])
def test_no_process_of_ray_survives(tmp_path: Path, way: str) -> None:
    owner = [sys.executable, "-c", _OWNER, str(tmp_path / "log"), way]
    done = subprocess.run(owner, capture_output=True, text=True, timeout=60, check=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    try:
        deadline = time.monotonic() + 60.0
        while _live(pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _live(pids)
    finally:
        for pid in _live(pids):
            os.kill(pid, signal.SIGKILL)


def _live(pids: list[int]) -> list[int]:
    states = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return [pid for pid, state in states.items() if state not in "ZX"]


class StartedRay:
    """Ends with status 1 as often as `deaths` says, then runs."""

    deaths = 0
    logs: list[Path]
    stopped = 0

    def __init__(self, ports: RayPorts, num_cpus: int, log: Path, environment: dict[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("why it ended\n")
        self.logs.append(log)
        self._dies = len(self.logs) <= self.deaths
        self.log = log

    def exit_status(self) -> int | None:
        return 1 if self._dies else None

    def stop(self) -> None:
        type(self).stopped += 1


@pytest.mark.parametrize("deaths", [0, 2, 3])
def test_a_ray_that_ends_while_it_starts_is_started_again(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_RUN_DIR", tmp_path)
    kind: type[StartedRay] = type("Ray", (StartedRay,), {"deaths": deaths, "logs": []})
    monkeypatch.setattr(launch, "LocalRay", kind)
    monkeypatch.setattr(ServeApi, "answers", lambda api: True)
    monkeypatch.setattr(ServeApi, "serves", lambda api: len(kind.logs) > deaths)
    launcher = launch.Launcher(launch.parse_arguments([]))
    with launcher._exit:
        if deaths == 3:
            with pytest.raises(LaunchError, match=r"did not start in 3 tries; .*-ray-3\.log ends with\nwhy it ended"):
                launcher._start_ray(1)
        else:
            launcher._start_ray(1)
    assert (len(set(kind.logs)), kind.stopped) == (min(3, deaths + 1), deaths)
    assert capsys.readouterr().out.count("ended with status 1 while it started; see ") == deaths


def test_without_haproxy_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere/haproxy")
    launcher = launch.Launcher(launch.parse_arguments([]))
    with launcher._exit, pytest.raises(LaunchError, match=r"no HAProxy: .*/nowhere/haproxy"):
        launcher._start_ray(1)
