"""How `make serve` has Serve start HAProxy; test_mock_serving.py is with it, test_serve_proxy.py without it."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest
from ray.serve._private import constants, haproxy_templates

from app.launch.haproxy import claim_ports, haproxy_environment
from app.launch.launcher import main

EVERYWHERE = re.compile(r"^\s*bind \*?:", re.MULTILINE)


def run(folder: Path, configuration: str, *arguments: str) -> tuple[str, list[str]]:
    """What the script makes of a configuration, and what HAProxy is then called with."""
    binary = folder / "haproxy"
    binary.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    binary.chmod(0o755)
    file = folder / "a file.cfg"
    file.write_text(configuration)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(binary))
        files = folder / "files"
        files.mkdir()
        variables = haproxy_environment("127.0.0.1", range(9101, 9110), files)
    command = [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), *arguments]
    called = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return file.read_text(), called.splitlines()


def test_what_listens_everywhere_is_changed_and_requests_are_forwarded_with_their_address(tmp_path: Path) -> None:
    kept = "    option splice-response\nfrontend http_frontend\n    bind 127.0.0.1:8000\n  bind 0.0.0.0:9000 proto h2\n"
    given = f"    bind :9101\n    option splice-request\n{kept}  bind *:8404\n"
    written, called = run(tmp_path, given, "-dR", "-sf", "17")
    assert written == f"    bind 127.0.0.1:9101\n    option forwardfor\n{kept}  bind 127.0.0.1:8404\n"
    assert called == ["-db", "-f", str(tmp_path / "a file.cfg"), "-dR", "-sf", "17"]


def test_serves_own_configuration_has_the_lines_that_the_script_knows(tmp_path: Path) -> None:
    """Contract: it listens everywhere for statistics only, and it splices requests."""
    template = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    assert [line.strip() for line in template.splitlines() if EVERYWHERE.match(line)] == [
        "bind :{{ config.metrics_port }}",
        "bind *:{{ config.stats_port }}",
    ]
    assert "    option splice-request\n" in template
    written, _ = run(tmp_path, template)
    assert not EVERYWHERE.search(written)
    assert "splice-request" not in written
    assert written.count("    option forwardfor\n") == 1


def test_it_is_for_a_ray_of_our_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.launch.launcher.port_answers", lambda *where: True)
    monkeypatch.setattr("app.launch.serve_api.ServeApi.answers", lambda api: True)
    monkeypatch.setattr("app.launch.interrupts.signal.signal", lambda *handler: None)
    assert main(["--config", "configs/mock.yaml", "--proxy", "haproxy"]) == 1
    assert "RAY_SERVE_ENABLE_HA_PROXY" in capsys.readouterr().err


def test_serve_reads_every_variable(tmp_path: Path) -> None:
    """Contract: a variable that Serve has renamed would leave its default, without a word."""
    known = Path(constants.__file__).read_text()
    assert [
        name for name in haproxy_environment("127.0.0.1", range(9101, 9110), tmp_path) if f'"{name}"' not in known
    ] == []


def test_no_two_have_a_port_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.launch.haproxy._BLOCKS", [range(32_600, 32_610), range(32_610, 32_620)])
    first, ports = claim_ports()
    second, others = claim_ports()
    with first, second:
        assert len(ports) == len(others) == 9
        assert not set(ports) & set(others)
        with pytest.raises(OSError, match="32600 to 32619 are taken"):
            claim_ports()
    again, _ = claim_ports()
    again.close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 32_602))
        taken.listen()
        third, ports = claim_ports()
        third.close()
    assert ports.start == 32_611, "another process has a port of the other block"
