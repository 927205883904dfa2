"""A request through a whole application under Serve: one trace over all processes, and logs as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.client import until
from tests.e2e.cluster import NAME, Cluster, processes, started
from tests.traces import PARENT, TRACE, TRACEPARENT, Collector, Sent, collector

PATIENCE_S = 300.0
PROMPT = list(range(1000, 1040))
PATH = "/v1/completions"
pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def received() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def traced(received: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("traced")
    serve = yaml.safe_load((Path(__file__).resolve().parents[3] / "configs" / "mock.yaml").read_text())
    arguments = serve["applications"][0]["args"]
    arguments |= {"log_format": "json", "tracing": {"otlp": received.url}}
    for pool in (arguments["prefill"], *arguments["decode"].values()):
        pool["engine"]["step_s"] = 0.02
    path = folder / "traced.yaml"
    path.write_text(yaml.safe_dump(serve))
    with started(str(path), folder) as cluster:
        yield cluster


def asked(tokens: int) -> dict[str, Any]:
    return {"model": "mock", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def spans(received: Collector, trace_id: str, *names: str) -> dict[str, Sent]:
    """Wait for these spans of a trace. With one name twice, the newest counts; parts are named by their pool, too."""

    def found() -> dict[str, Sent]:
        mine = [span for span in list(received.spans) if span.trace_id == trace_id]
        return {span.name if span.name != "part" else f"part of {span.service}": span for span in mine}

    await until(lambda: set(names) <= found().keys(), PATIENCE_S, "the spans are there")
    return found()


async def test_one_trace_over_all_processes(traced: Cluster, received: Collector) -> None:
    async with httpx.AsyncClient(base_url=traced.url, timeout=PATIENCE_S) as client:
        response = await client.post(PATH, json=asked(8), headers={"traceparent": TRACEPARENT, "x-request-id": "seen"})
    assert response.status_code == 200
    stages = ("session", "placement", "prefill", "handoff", "decode")
    found = await spans(received, TRACE, f"POST {PATH}", *stages, "admission", "part of baton-prefill")
    request, session = found[f"POST {PATH}"], found["session"]
    assert (request.service, request.parent) == ("baton-ingress", PARENT)
    assert session.parent == request.span_id
    assert {found[name].parent for name in stages[1:]} == {session.span_id}
    assert (found["admission"].service, found["admission"].parent) == (
        "baton-session-manager",
        found["placement"].span_id,
    )
    owner = found["decode"].attributes["baton.pool"]
    found = await spans(received, TRACE, f"part of baton-{owner}")
    for pool in ("prefill", owner):
        assert found[f"part of baton-{pool}"].parent == session.span_id
    assert found[f"part of baton-{owner}"].instance == found["decode"].attributes["baton.replica"]
    assert request.attributes["gen_ai.request.id"] == "seen"
    assert "seen" in session.attributes["baton.session"]


def log_of_ingress(cluster: Cluster) -> Path:
    title = f"ray::ServeReplica:{NAME}:ingress"
    (pid,) = [pid for pid, line in processes(cluster.marker).items() if line.startswith(title)]
    return Path(f"/proc/{pid}/fd/2").resolve()


async def test_a_lost_replica_is_in_the_trace_and_in_the_log(traced: Cluster, received: Collector) -> None:
    trace_id = "1" * 32
    written = await asyncio.to_thread(log_of_ingress, traced)
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "x-request-id": "lost-one"}
    body = {**asked(1000), "stream": True}
    async with (
        httpx.AsyncClient(base_url=traced.url, timeout=PATIENCE_S) as client,
        client.stream("POST", PATH, json=body, headers=headers) as response,
    ):
        chunks = response.aiter_lines()
        while not (await anext(chunks)).startswith("data: "):
            pass
        (promise,) = (await asyncio.to_thread(traced.status))["promises"]
        pool = (await asyncio.to_thread(traced.status))["replicas"][promise["decode"]]["pool"]
        await asyncio.to_thread(traced.kill, pool)
        rest = [line async for line in chunks]
    assert rest[-2:] == ["data: [DONE]", ""]
    found = await spans(received, trace_id, f"POST {PATH}", "session", "recovery")
    assert found["recovery"].attributes["baton.cause"] == "loss"
    assert found["recovery"].parent == found["session"].span_id
    assert found["session"].attributes["baton.outcome"] == "length"
    session_id = found["session"].attributes["baton.session"]

    def lines() -> list[dict[str, Any]]:
        told = [json.loads(line) for line in written.read_text().splitlines() if line.startswith("{")]
        return [line for line in told if line.get("session_id") == session_id]

    await until(lambda: bool(lines()), PATIENCE_S, "the line is there")
    line = lines()[0]
    assert (line["levelname"], line["name"], line["deployment"]) == ("WARNING", "baton.core", "ingress")
    assert "lost" in line["message"]
    assert all(str(token) not in line["message"] for token in PROMPT)
