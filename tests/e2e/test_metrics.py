"""What Prometheus scrapes from Ray while a real model is served: what Ray's Serve LLM dashboard asks for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.e2e.client import MODEL, client_of, tokens
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import prompt
from tests.metrics_asked import asked_by_ray

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WITHIN_S = 60.0
"""Ray's processes tell its exporter their metrics every ten seconds."""
ASKED, ANSWER_TOKENS, PROMPT_TOKENS, BLOCK_TOKENS = 3, 5, 300, 128
FIRST_TOKEN = "ray_vllm_time_to_first_token_seconds"
BY_WORKER = "ray_serve_deployment_request_counter_total"


def scraped(cluster: Cluster) -> list[Sample]:
    """What all of Ray's exporters show, found as Prometheus finds them."""
    headers = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
    found = httpx.get(f"{cluster.dashboard_url}/api/prometheus/sd", headers=headers, timeout=WITHIN_S).json()
    targets = {target for group in found for target in group["targets"]}
    assert targets, found
    return [sample for target in targets for sample in _samples(target)]


def _samples(target: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(httpx.get(f"http://{target}/metrics", timeout=WITHIN_S).text):
        yield from family.samples


def summed(samples: list[Sample], name: str, **labels: str) -> float:
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def told_at_once(samples: list[Sample]) -> bool:
    """Whether all that tells of first tokens tells the same. In the middle of a report it does not."""
    ingress, *others = {each.labels["WorkerId"] for each in samples if each.name == f"{FIRST_TOKEN}_sum"} or {""}
    assert not others
    parts = summed(samples, "ray_baton_ttft_seconds_total", WorkerId=ingress)
    whole = summed(samples, f"{FIRST_TOKEN}_bucket", WorkerId=ingress, le="+Inf")
    same = parts == pytest.approx(summed(samples, f"{FIRST_TOKEN}_sum", WorkerId=ingress))
    return bool(same) and whole == summed(samples, f"{FIRST_TOKEN}_count", WorkerId=ingress)


GROW = {
    "ray_vllm_request_success_total": ASKED,
    "ray_vllm_generation_tokens_total": ASKED * ANSWER_TOKENS,
    "ray_vllm_prompt_tokens_total": ASKED * PROMPT_TOKENS,
    "ray_vllm_prefix_cache_hits_total": BLOCK_TOKENS,
    "ray_vllm_time_to_first_token_seconds_count": ASKED,
    "ray_vllm_inter_token_latency_seconds_count": ASKED * (ANSWER_TOKENS - 1),
    "ray_vllm_request_prefill_time_seconds_count": ASKED,
    "ray_vllm_e2e_request_latency_seconds_sum": 0.001,
    "ray_vllm_nixl_bytes_transferred_sum": 1.0,
    "ray_baton_handoffs_total": 2 * ASKED,
    "ray_baton_placements_total": ASKED,
}
"""By how much, at the least."""


async def test_rays_serve_llm_dashboard_finds_what_it_asks_for(baton: Cluster) -> None:
    before = await asyncio.to_thread(scraped, baton)
    async with client_of(baton) as client:
        for _ in range(ASKED):  # the second time from the prefix cache
            await tokens(client, prompt(70_000, PROMPT_TOKENS), ANSWER_TOKENS)

    def lacks(samples: list[Sample]) -> set[str]:
        grown = {name: summed(samples, name) - summed(before, name) for name in GROW}
        late = {name for name, least in GROW.items() if grown[name] < least}
        torn = set() if told_at_once(samples) else {FIRST_TOKEN}
        return late | torn | (asked_by_ray() - {each.name for each in samples})

    deadline_s = time.monotonic() + WITHIN_S
    while (left := lacks(samples := await asyncio.to_thread(scraped, baton))) and time.monotonic() < deadline_s:
        await asyncio.sleep(1.0)
    assert left == set()
    asked = [each for each in samples if each.name in asked_by_ray()]
    assert {each.labels["model_name"] for each in asked} == {MODEL}
    workers = {each.labels["WorkerId"]: each.labels["deployment"] for each in samples if each.name == BY_WORKER}
    joined = [each.labels for each in asked if each.labels["WorkerId"] in workers]
    assert {workers[labels["WorkerId"]] == labels["deployment"] for labels in joined} == {True}
    deployments = {labels["deployment"] for labels in joined}
    assert deployments >= {"ingress", "prefill"}, "the panels join by this label"
    assert deployments & {"decode-small", "decode-large"}
