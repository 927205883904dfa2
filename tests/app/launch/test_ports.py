"""TCP ports of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.launch import ports as port_module
from app.launch.ports import free_port, port_is_free


def test_a_free_port_is_given_only_once() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        chosen_by_the_system = server.getsockname()[1]
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert first <= chosen_by_the_system <= last
    ports = {free_port("127.0.0.1") for _ in range(50)}
    assert not ports & set(range(first, last + 1)), "nor by the system to a process that asks for any"
    assert ports <= set(range(20_000, 22_000)), "nor by Ray to its workers, nor by Serve to ingresses"
    assert len(ports) == 50


def test_a_free_port_is_given_to_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given = free_port("127.0.0.1")
    few = range(given, given + 2)
    ask = f"""
from app.launch import ports
ports._RESERVED = {few!r}
print(ports.free_port("127.0.0.1"))
"""
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) != given
    monkeypatch.setattr(port_module, "_RESERVED", few)
    assert free_port("127.0.0.1", {given + 1}) not in few


def test_a_port_that_is_busy_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        busy = server.getsockname()[1]
        monkeypatch.setattr(port_module, "_RESERVED", range(busy, busy + 1))
        monkeypatch.setattr(port_module, "_chosen_by_the_system", lambda: range(busy + 1, 65536))
        assert free_port("127.0.0.1") != busy
    monkeypatch.setattr(port_module, "_chosen_by_the_system", lambda: range(1024, 65536))
    assert port_is_free("127.0.0.1", free_port("127.0.0.1")), "where the system chooses from all"
