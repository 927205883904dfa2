"""A real Prometheus scrapes a real cluster under load, and no expression of a dashboard or an alert is empty that has a
meaning. What scaling counts is asked in `tests/deployments/serve/test_observe.py`, where pools scale.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.launch.prometheus import Prometheus, scrape_configuration
from app.launch.serve_api import ServeApi
from tests.e2e.client import MODEL, body, client_of
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import prompt
from tests.metrics_asked import is_expected, questions
from tests.prometheus_asked import require_prometheus, unanswered

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WITHIN_S = 300.0
"""Ray's processes tell its exporter their metrics every ten seconds, and Prometheus scrapes as often."""
ASKED = [
    body(prompt(71_000, 300), 8),  # split, and from the second time on found in caches
    body(prompt(71_001, 140), 16),
    body(prompt(71_002, 40), 4, prompt_logprobs=0),  # kept whole by a rule
]


@pytest.fixture
def prometheus(baton: Cluster, tmp_path: Path) -> Iterator[Prometheus]:
    require_prometheus()
    started = Prometheus()
    try:
        started.start(scrape_configuration(ServeApi(baton.dashboard_url).session()), tmp_path / "prometheus.log")
        yield started
    finally:
        started.stop()


async def ask_until(over: asyncio.Event, cluster: Cluster) -> None:
    """Ask all questions at once, again and again."""
    async with client_of(cluster) as client:
        while not over.is_set():
            answers = await asyncio.gather(*(client.post("/v1/completions", json=each) for each in ASKED))
            assert [answer.status_code for answer in answers] == [200] * len(ASKED)


async def test_no_dashboard_and_no_alert_asks_in_vain(baton: Cluster, prometheus: Prometheus) -> None:
    asked = questions(MODEL)
    every = {each for expressions in asked.values() for each in expressions}
    over = asyncio.Event()
    load = asyncio.create_task(ask_until(over, baton))
    try:
        expected = {each for each in every if is_expected(each) and "baton_scaling" not in each}
        left = await unanswered(prometheus.url, expected, WITHIN_S)
        await unanswered(prometheus.url, every - expected, 0.0)  # none of them is an error
    finally:
        over.set()
        await load
    assert {where: found for where, expressions in asked.items() if (found := left & set(expressions))} == {}
