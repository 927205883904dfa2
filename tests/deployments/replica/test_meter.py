"""What a replica tells of itself for Prometheus."""

from __future__ import annotations

from deployments.engine.protocol import EngineLoad
from deployments.metrics.registry import Registry
from deployments.replica.meter import READ_EVERY, ReplicaMeter


class Replica:
    """As much of one as is measured."""

    def __init__(self) -> None:
        self.open_runs, self.ended_runs, self.total_blocks, self.refreshed = 2, 7, 40, 0
        self.load = EngineLoad(used_blocks=10, running=2, waiting=3, deferred=1)
        self.totals = {
            "cached_tokens": 16.0,
            "handoffs_landed": 4.0,
            "write_s": 0.5,
            "bytes_written": 2e6,
            "bytes_overlapped": 1.5e6,
            "writes": 8.0,
            "blocks_fetched": 5.0,
            "fetch_s": 0.125,
            "fetches_broken": 3.0,
            "fetches_corrupt": 2.0,
            "tier_host_hits": 6.0,
            "tier_disk_evicted": 2.0,
            "tier_misses": 3.0,
            "tier_loaded_bytes": 4e6,
            "tier_store_s": 0.25,
            "tier_digest_failures": 1.0,
        }

    async def refresh(self) -> None:
        self.refreshed += 1


async def test_a_replicas_figures_become_metrics() -> None:
    registry, replica = Registry(model_name="m", pool="prefill"), Replica()
    await ReplicaMeter(registry, replica).collect()
    found = {(each.name, *(value for _, value in each.labels[2:])): each.value for each in registry.samples()}
    assert {labels["pool"] for labels in (dict(each.labels) for each in registry.samples())} == {"prefill"}
    expected = {
        ("vllm_num_requests_waiting",): 3,
        ("vllm_num_requests_waiting_by_reason", "deferred"): 1,
        ("vllm_num_requests_waiting_by_reason", "capacity"): 2,
        ("vllm_kv_cache_usage_perc",): 0.25,
        ("vllm_prefix_cache_hits",): 16,
        ("vllm_nixl_xfer_time_seconds_sum",): 0.5,
        ("vllm_nixl_xfer_time_seconds_count",): 8,
        ("vllm_nixl_bytes_transferred_sum",): 2e6,
        ("baton_handoffs", "landed"): 4,
        ("baton_handoff_bytes", "during_prefill"): 1.5e6,
        ("baton_handoff_bytes", "after_prefill"): 0.5e6,
        ("baton_fetches", "broken"): 3,
        ("baton_fetches_corrupt",): 2,
        ("baton_fetched_blocks",): 5,
        ("baton_fetch_seconds",): 0.125,
        ("baton_tier_blocks", "host", "hits"): 6,
        ("baton_tier_blocks", "disk", "evicted"): 2,
        ("baton_tier_misses",): 3,
        ("baton_tier_bytes", "loaded"): 4e6,
        ("baton_tier_seconds", "stored"): 0.25,
        ("baton_tier_errors", "digest"): 1,
        ("baton_sessions_running",): 2,
        ("baton_sessions_ended",): 7,
    }
    assert {key: found.get(key) for key in expected} == expected


async def test_an_engine_is_asked_for_its_counters_now_and_then() -> None:
    replica = Replica()
    meter = ReplicaMeter(Registry(model_name="m", pool="p"), replica)
    for _ in range(2 * READ_EVERY):
        await meter.collect()
    assert replica.refreshed == 2
