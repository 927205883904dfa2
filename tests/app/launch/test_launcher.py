"""The launcher without a Ray: what it says before anything starts, and a Ray that ends while it starts."""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from app.launch import launcher as launch
from app.launch.arguments import parse_arguments
from app.launch.config import LaunchError
from app.launch.ports import RayPorts, free_port, port_answers, port_is_free
from app.launch.serve_api import ServeApi


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


class StartedRay:
    """Ends with status 1 as often as `deaths` says, then runs. Its folder goes away when it is stopped."""

    deaths = 0
    logs: list[Path]
    stopped = 0

    def __init__(self, ports: RayPorts, num_cpus: int, log: Path, environment: dict[str, str], folder: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("why it ended\n")
        self.logs.append(log)
        self._folder = folder
        assert Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"]).is_relative_to(folder)
        self._dies = len(self.logs) <= self.deaths
        self.log = log

    def exit_status(self) -> int | None:
        return 1 if self._dies else None

    def stop(self) -> None:
        type(self).stopped += 1
        shutil.rmtree(self._folder)


@pytest.mark.parametrize("deaths", [0, 2, 3])
def test_a_ray_that_ends_while_it_starts_is_started_again(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_RUN_DIR", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kind: type[StartedRay] = type("Ray", (StartedRay,), {"deaths": deaths, "logs": []})
    monkeypatch.setattr(launch, "LocalRay", kind)
    monkeypatch.setattr(ServeApi, "answers", lambda api: True)
    monkeypatch.setattr(ServeApi, "serves", lambda api: len(kind.logs) > deaths)
    launcher = launch.Launcher(parse_arguments([]))
    with launcher._exit:
        if deaths == 3:
            with pytest.raises(LaunchError, match=r"did not start in 3 tries; .*-ray-3\.log ends with\nwhy it ended"):
                launcher._start_ray(1)
        else:
            launcher._start_ray(1)
    assert (len(set(kind.logs)), kind.stopped) == (min(3, deaths + 1), deaths)
    assert capsys.readouterr().out.count("ended with status 1 while it started; see ") == deaths


def test_without_haproxy_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere/haproxy")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launcher = launch.Launcher(parse_arguments([]))
    with launcher._exit, pytest.raises(LaunchError, match=r"no HAProxy: .*/nowhere/haproxy"):
        launcher._start_ray(1)
    assert not list(tmp_path.iterdir())
