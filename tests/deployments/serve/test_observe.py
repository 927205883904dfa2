"""`make serve OBSERVE=1`: Prometheus beside a Ray of our own, from its start to its end. Engines are mocks, and pools
scale, so what scaling counts is there.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from load_tests.harness.application import free_port
from tests.e2e.client import until
from tests.e2e.cluster import Cluster, processes, started
from tests.metrics_asked import questions, rules
from tests.prometheus_asked import require_prometheus, unanswered

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

WITHIN_S = 300.0
MODEL = "mock"


def get(url: str, **headers: str) -> Any:
    answer = httpx.get(url, headers=headers, timeout=60.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rules_at(url: str) -> list[dict[str, Any]]:
    """The alerts of a Prometheus, with their health."""
    (group,) = get(f"{url}/api/v1/rules")["data"]["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def data_of_prometheus(cluster: Cluster) -> Path:
    """The folder of the data of the cluster's Prometheus, as its command line names it."""
    lines = processes(cluster.marker).values()
    (folder,) = {found[1] for line in lines if (found := re.search(r"--storage\.tsdb\.path=(\S+)", line))}
    return Path(folder)


async def ask(cluster: Cluster) -> None:
    """Some requests of each class, so that pools grow."""
    fixed = {"model": MODEL, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    bodies = [
        (fixed | {"prompt": list(range(first, first + 200))}, {"x-baton-class": name})
        for first in (100, 400, 700)
        for name in ("interactive", "batch")
    ]
    async with httpx.AsyncClient(base_url=cluster.url, timeout=WITHIN_S) as client:
        asked = (client.post("/v1/completions", json=body, headers=headers) for body, headers in bodies)
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * len(bodies)


async def test_prometheus_is_there_from_the_start_to_the_end(tmp_path: Path) -> None:
    require_prometheus()
    url = f"http://127.0.0.1:{free_port()}"
    options = ["--observe", "--prometheus-port", url.rpartition(":")[2]]
    with started("mock-scaling.yaml", tmp_path, options=options) as cluster:
        assert f"Prometheus {url}\n" in cluster.application.log.read_text()
        token = {"authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
        assert get(f"{cluster.dashboard_url}/api/prometheus_health", **token)["result"] is True

        def exporters() -> list[str]:
            """Those that are scraped, without a token: Ray's dashboard wants one, its exporters do not."""
            return [
                each["scrapeUrl"]
                for each in get(f"{url}/api/v1/targets")["data"]["activeTargets"]
                if each["health"] == "up"
            ]

        await until(lambda: bool(exporters()), WITHIN_S, "an exporter is scraped")
        await ask(cluster)
        scaling = {each for part in questions(MODEL).values() for each in part if "baton_scaling" in each}
        assert scaling
        assert await unanswered(url, scaling, WITHIN_S) == set()
        await until(lambda: all(rule["health"] == "ok" for rule in rules_at(url)), WITHIN_S, "all rules are evaluated")
        assert [rule["name"] for rule in rules_at(url)] == [rule["alert"] for rule in rules()]
        data = data_of_prometheus(cluster)
        assert data.is_dir()
    assert not data.parent.exists()
