"""Logs as JSON on real engines: a session is found in every process that it was in, and no file has its text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.launch.current_cluster import current_cluster_file
from app.launch.serve_api import ServeApi
from tests.e2e.client import client_of, complete, until
from tests.e2e.cluster import NAME, Cluster, processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WITHIN_S = 60.0
REQUEST_ID, WORD = "seen-in-every-log", "Quizzaciously"
PROMPT = f"{WORD} " + "and on they went over the hills, " * 40


def folder_of(cluster: Cluster) -> Path:
    """The log files of the cluster's Ray, those of Serve below it."""
    return current_cluster_file().parent / ServeApi(cluster.dashboard_url).session() / "logs"


def logs_of(cluster: Cluster, deployment: str) -> list[Path]:
    """Where the one replica of a deployment and its engine write."""
    title = f"ray::ServeReplica:{NAME}:{deployment}"
    (pid,) = [pid for pid, line in processes(cluster.marker).items() if line.startswith(title)]
    return [Path(f"/proc/{pid}/fd/{number}").resolve() for number in (1, 2)]


def lines_about(cluster: Cluster, deployment: str) -> list[dict[str, Any]]:
    """The lines about the request. Each is a JSON object."""
    texts = [path.read_text(errors="replace") for path in logs_of(cluster, deployment)]
    return [json.loads(line) for text in texts for line in text.splitlines() if REQUEST_ID in line]


async def test_a_split_session_is_in_the_log_of_each_of_its_processes_and_its_text_in_none(baton: Cluster) -> None:
    async with client_of(baton) as client:
        client.headers["x-request-id"] = REQUEST_ID
        response = await complete(client, PROMPT, 5)
    assert response.headers["x-baton-mode"] == "disaggregated"
    answer = response.json()["choices"][0]["text"]
    found: dict[str, list[dict[str, Any]]] = {}

    def all_are_there() -> bool:
        found.update({name: lines_about(baton, name) for name in ("ingress", "prefill", *baton_decodes(baton))})
        return all(sessions(found, name) for name in ("ingress", "prefill", "decode"))

    await until(all_are_there, WITHIN_S, "the lines are there")
    (session_id,) = sessions(found, "ingress")
    assert REQUEST_ID in session_id
    assert sessions(found, "prefill") == sessions(found, "decode") == {session_id}
    (access,) = [line for line in found["ingress"] if line.get("id") == REQUEST_ID]
    assert (access["status"], access["mode"], access["output_tokens"]) == (200, "disaggregated", 5)
    files = await asyncio.to_thread(texts_below, folder_of(baton))
    assert any(session_id in text for text in files.values()), "these are the files"
    assert [path for path, text in files.items() if WORD in text or (answer and answer in text)] == []


def baton_decodes(cluster: Cluster) -> list[str]:
    return [pool for pool in cluster.status()["pools"] if pool.startswith("decode-")]


def sessions(found: dict[str, list[dict[str, Any]]], role: str) -> set[str]:
    """The sessions that the lines of a role's deployments name."""
    lines = [line for name, each in found.items() if name.startswith(role) for line in each]
    for line in lines:
        assert line.get("deployment", role).startswith(role)
    return {line["session_id"] for line in lines if "session_id" in line}


def texts_below(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()}
