"""`make serve HAPROXY=1`: Serve's HAProxy between clients and ingresses, over mock engines."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray.serve._private import haproxy_templates

from app.haproxy import haproxy_environment
from app.launch import main
from tests.e2e import cluster as clusters
from tests.e2e.client import events, until
from tests.e2e.cluster import Cluster, processes

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
        variables = haproxy_environment("127.0.0.1", (9101, 8404), folder / "script")
    command = [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), *arguments]
    called = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
    return file.read_text(), called.splitlines()


def test_only_what_listens_everywhere_is_changed(tmp_path: Path) -> None:
    kept = "frontend http_frontend\n    bind 127.0.0.1:8000\n  bind 0.0.0.0:9000 proto h2\n"
    written, called = run(tmp_path, f"    bind :9101\n{kept}  bind *:8404\n", "-dR", "-sf", "17")
    assert written == f"    bind 127.0.0.1:9101\n{kept}  bind 127.0.0.1:8404\n"
    assert called == ["-db", "-f", str(tmp_path / "a file.cfg"), "-dR", "-sf", "17"]


def test_serves_own_configuration_listens_everywhere_for_statistics_only(tmp_path: Path) -> None:
    """Contract: the two lines that the script knows, in the template as Serve has it."""
    template = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    assert [line.strip() for line in template.splitlines() if EVERYWHERE.match(line)] == [
        "bind :{{ config.metrics_port }}",
        "bind *:{{ config.stats_port }}",
    ]
    assert not EVERYWHERE.search(run(tmp_path, template)[0])


def test_it_is_for_a_ray_of_our_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.launch.port_answers", lambda *where: True)
    monkeypatch.setattr("app.serve_api.ServeApi.answers", lambda api: True)
    monkeypatch.setattr("app.launch.signal.signal", lambda *handler: None)
    assert main(["--config", "configs/mock.yaml", "--haproxy"]) == 1
    assert "RAY_SERVE_ENABLE_HA_PROXY=1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = clusters.start("mock.yaml", tmp_path_factory.mktemp("haproxy"), options=("--haproxy",))
    try:
        yield found
    finally:
        left = clusters.stop(found)
    assert not left, f"processes outlived the application: {left}"


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens for TCP, as /proc has them."""
    files = Path(f"/proc/{pid}/fd")
    sockets = {os.readlink(file) for file in files.iterdir()}  # noqa: PTH115 - a socket is no path
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.serve
@pytest.mark.timeout(900)
async def test_clients_are_served_through_it(cluster: Cluster) -> None:
    found = {pid: line for pid, line in processes(cluster.marker).items() if "/haproxy" in line.partition(" ")[0]}
    assert found, "HAProxy runs"
    assert {address for pid in found for address in listening(pid)} == {"0100007F"}, "it listens on loopback only"
    title = f"ray::ServeReplica:{clusters.NAME}:ingress"
    (ingress,) = [pid for pid, line in processes(cluster.marker).items() if line.startswith(title)]
    assert "00000000" not in listening(ingress), "and so does what it sends requests to"
    body = {"model": "mock", "prompt": list(range(100, 160)), "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client:
        whole = await client.post("/v1/completions", json=body | {"return_token_ids": True})
        assert whole.headers["x-baton-mode"] == "disaggregated"
        tokens = whole.json()["choices"][0]["token_ids"]
        streamed = body | {"stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=streamed) as response:
            assert response.headers["x-baton-mode"] == "disaggregated"
            chunks = [event async for event in events(response)]
        assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or ()] == tokens
        assert len(chunks) > 10, "a chunk is passed on when it comes"
        wrong = await client.post("/v1/completions", json=body | {"model": "none"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "model")
        named = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        assert named.headers["x-request-id"] == "mine"
        async with client.stream("POST", "/v1/completions", json=streamed | {"max_tokens": 400}) as response:
            async for _ in response.aiter_lines():
                break
    await until(lambda: not cluster.status()["sessions"]["open"], 60.0, "the client is gone")
    assert (await asyncio.to_thread(cluster.settled))["sessions"]["closed"]["cancelled"] == 1
