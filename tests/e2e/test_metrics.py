"""What Prometheus scrapes from Ray while a real model is served: what Ray's Serve LLM dashboard asks for."""

from __future__ import annotations

import asyncio
import os
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
ASKED, ANSWER_TOKENS, PROMPT_TOKENS = 3, 5, 300
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


async def test_rays_serve_llm_dashboard_finds_what_it_asks_for(baton: Cluster) -> None:
    before = await asyncio.to_thread(scraped, baton)
    async with client_of(baton) as client:
        for seed in range(ASKED):
            await tokens(client, prompt(70_000 + seed, PROMPT_TOKENS), ANSWER_TOKENS)
    samples = before

    def grew(name: str, **labels: str) -> float:
        return summed(samples, name, **labels) - summed(before, name, **labels)

    async with asyncio.timeout(WITHIN_S):
        while grew("ray_vllm_request_success_total") < ASKED or asked_by_ray() - {each.name for each in samples}:
            await asyncio.sleep(1.0)
            samples = await asyncio.to_thread(scraped, baton)
    assert grew("ray_vllm_request_success_total", finished_reason="length") == ASKED
    assert grew("ray_vllm_generation_tokens_total") == ASKED * ANSWER_TOKENS
    assert grew("ray_vllm_prompt_tokens_total") == ASKED * PROMPT_TOKENS, "not once more where decode loads them"
    assert grew("ray_vllm_prompt_tokens_by_source_total", source="local_compute") == ASKED * PROMPT_TOKENS
    for name in ("time_to_first_token_seconds", "request_prefill_time_seconds", "e2e_request_latency_seconds"):
        assert grew(f"ray_vllm_{name}_count") == grew(f"ray_vllm_{name}_bucket", le="+Inf") == ASKED
        assert 0 < grew(f"ray_vllm_{name}_sum") < WITHIN_S
    assert grew("ray_vllm_inter_token_latency_seconds_count") == ASKED * (ANSWER_TOKENS - 1)
    assert grew("ray_baton_ttft_seconds_total") == pytest.approx(grew("ray_vllm_time_to_first_token_seconds_sum"))
    asked = [each for each in samples if each.name in asked_by_ray()]
    assert {each.labels["model_name"] for each in asked} == {MODEL}
    workers = {each.labels["WorkerId"]: each.labels["deployment"] for each in samples if each.name == BY_WORKER}
    assert {each.labels["WorkerId"] for each in asked} <= workers.keys(), "the panels join by this label"
    assert {workers[each.labels["WorkerId"]] for each in asked} == {each.labels["deployment"] for each in asked}
