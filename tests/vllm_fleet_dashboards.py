"""What vLLM's dashboards of a fleet of servers ask Prometheus for: overview, instances, KV cache, service status and
speculative decoding (`examples/observability/dashboards/grafana` of its repository, as of November 2026). They are
newer than those in `vllm_dashboards.py`. Metrics have the names that vLLM has outside of Ray.
"""

from __future__ import annotations

from collections.abc import Iterator

_TARGET = 'job=~"$job", instance=~"$instance"'
_ENGINE = f'{_TARGET}, model_name=~"$model_name", engine=~"$engine"'
_FAILED = 'finished_reason="error"'
_WINDOW, _RANGE = "$__rate_interval", "$__range"
_BY = ("", "model_name, instance", "instance, engine")
_TTFT, _TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"
_REQUESTS, _RUNNING, _WRITTEN = (
    "vllm:request_success_total",
    "vllm:num_requests_running",
    "vllm:generation_tokens_total",
)
_SLEEP = "vllm:engine_sleep_state"
_HISTOGRAMS = (
    *(_TTFT, _TPOT, "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"),
    *("vllm:request_queue_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens"),
    *("vllm:iteration_tokens_total", "vllm:kv_block_lifetime_seconds", "vllm:kv_block_idle_before_evict_seconds"),
    *("vllm:kv_block_reuse_gap_seconds", "vllm:nixl_xfer_time_seconds", "vllm:nixl_bytes_transferred"),
    *("vllm:nixl_post_time_seconds", "vllm:nixl_num_descriptors", "vllm:kv_offload_lookup_sync_delay_seconds"),
    *("vllm:kv_offload_lookup_async_delay_seconds",),
)
_MEANS = (
    *("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"),
    *("vllm:request_prefill_kv_computed_tokens", "vllm:kv_offload_load_size", "vllm:kv_offload_store_size"),
)
_COUNTERS = (
    *(
        _REQUESTS,
        _WRITTEN,
        "vllm:prompt_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:iteration_tokens_total_count",
    ),
    *(
        "vllm:prompt_tokens_cached_by_source_total",
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_xfer_time_seconds_count",
    ),
    *("vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_notifications_total"),
    *("vllm:nixl_num_kv_expired_reqs_total", "vllm:nixl_num_notifications_after_expiry_total"),
    *("vllm:kv_offload_load_bytes_total", "vllm:kv_offload_store_bytes_total"),
    *("vllm:kv_offload_allocation_failure_total", "vllm:kv_offload_stores_skipped_total"),
    *("vllm:simple_kv_offload_save_outcomes_total", "vllm:simple_kv_offload_load_blocks_total"),
    *("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
    *("vllm:estimated_flops_per_gpu_total", "vllm:estimated_read_bytes_per_gpu_total"),
    *("vllm:estimated_write_bytes_per_gpu_total",),
)
_GAUGES = {
    _RUNNING: ("sum", "count"),
    "vllm:num_requests_waiting": ("sum",),
    "vllm:num_requests_waiting_by_reason": ("sum",),
    "vllm:num_requests_kv_fetch_by_stage": ("sum",),
    "vllm:kv_cache_usage_perc": ("max", "avg", "min"),
    _SLEEP: ("max",),
    "vllm:kv_offload_cpu_cache_usage_perc": ("max",),
    "vllm:kv_offload_cpu_cache_write_usage_perc": ("max",),
    "vllm:kv_offload_cpu_cache_read_usage_perc": ("max",),
    "vllm:simple_kv_offload_used_blocks": ("sum",),
    "vllm:simple_kv_offload_pending_store_blocks": ("sum",),
}
_RATIOS = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"),
    ("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
    ("vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_total"),
    ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum"),
    ("vllm:kv_offload_load_bytes_total", "vllm:kv_offload_load_time_total"),
    ("vllm:kv_offload_store_bytes_total", "vllm:kv_offload_store_time_total"),
    ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"),
    ("vllm:spec_decode_num_accepted_tokens_total", _WRITTEN),
)
_SERIES = {
    "vllm:prompt_tokens_by_source_total": ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    _REQUESTS: ("finished_reason", ("error",)),
}
"""Counters that are asked for by the value of a label."""
_OBJECTIVES = {_TTFT: "1.0", _TPOT: "0.1"}
"""The defaults, which must be bounds of buckets."""


def _of(metric: str, *more: str) -> str:
    return f"{metric}{{{', '.join((_ENGINE, *more))}}}"


def _rate(metric: str, *more: str, by: str = "", window: str = _WINDOW) -> str:
    return f"sum by ({by}) (rate({_of(metric, *more)}[{window}]))"


def _ratio(part: str, whole: str, matching: str = "") -> str:
    """Without the series whose divisor is 0."""
    return f"{part} / {matching} ({whole} > 0)"


def expressions() -> Iterator[str]:
    """Each kind of expression of each metric."""
    yield from _of_histograms()
    yield from _of_counters()
    for metric, functions in _GAUGES.items():
        yield from (f"{function} by ({by}) ({_of(metric)})" for function in functions for by in _BY)
    for reason in ("capacity", "deferred"):
        reason_is = f'reason="{reason}"'
        yield f"sum({_of('vllm:num_requests_waiting_by_reason', reason_is)})"
    yield from _of_models()
    yield from _of_servers()


def _of_histograms() -> Iterator[str]:
    for metric in _HISTOGRAMS:
        for by in _BY:
            buckets = _rate(f"{metric}_bucket", by=f"le, {by}" if by else "le")
            yield from (f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.95, 0.99))
        yield _rate(f"{metric}_bucket", by="le")
        whole = f"sum(increase({_of(f'{metric}_count')}[{_RANGE}]))"
        spread = f"sum by (le) (increase({_of(f'{metric}_bucket')}[{_RANGE}]))"
        yield _ratio(spread, whole, "on () group_left ()")
    for metric in (*_HISTOGRAMS, *_MEANS):
        yield from (_ratio(_rate(f"{metric}_sum", by=by), _rate(f"{metric}_count", by=by)) for by in _BY)
    for metric, bound in _OBJECTIVES.items():
        yield _ratio(_rate(f"{metric}_bucket", f'le="{bound}"'), _rate(f"{metric}_count"))


def _of_counters() -> Iterator[str]:
    for metric in _COUNTERS:
        yield from (_rate(metric, by=by, window=window) for by in _BY for window in (_WINDOW, _RANGE))
    for part, whole in _RATIOS:
        yield from (_ratio(_rate(part, by=by), _rate(whole, by=by)) for by in _BY)
    for metric, (label, values) in _SERIES.items():
        yield _rate(metric, by=label)
        yield from (_rate(metric, f'{label}="{value}"') for value in values)
    by_reason = "ignoring (finished_reason) group_left ()"
    yield _ratio(_rate(_REQUESTS, by="finished_reason"), _rate(_REQUESTS), by_reason)
    yield f"1 - {_ratio(_rate(_REQUESTS, _FAILED), _rate(_REQUESTS))}"


def _of_models() -> Iterator[str]:
    """The summary of each model, and how a service does."""
    yield f"count by (model_name) (group by (model_name, instance) (last_over_time({_of(_RUNNING)}[{_RANGE}])))"
    yield f"max by (model_name) (max_over_time({_of('vllm:kv_cache_usage_perc')}[{_RANGE}]))"
    yield f"round(sum by (model_name) (increase({_of('vllm:num_preemptions_total')}[{_RANGE}])))"
    at_once = f"sum(avg_over_time({_of(_RUNNING)}[5m]))"
    yield f"({_ratio(_rate(_WRITTEN), at_once)}) and on () count({_of(_RUNNING)})"
    yield f"60 * {_rate(_REQUESTS)}"
    awake = _of(_SLEEP, 'sleep_state="awake"')
    yield f"(2 - (max({awake}) == bool 0)) or vector(0)"


def _of_servers() -> Iterator[str]:
    """Servers of HTTP, their processes, and what Prometheus knows of them."""
    asked = f"rate(http_requests_total{{{_TARGET}}}[{_WINDOW}])"
    yield from (f"sum by ({by}) ({asked})" for by in ("status", "handler"))
    took = f"http_request_duration_seconds_sum{{{_TARGET}}}[{_WINDOW}]"
    yield f"sum by (handler) (rate({took}))"
    yield 'count(up{job=~"$job"} == 0) or vector(0)'
    for name in ("resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds"):
        yield f"sum by (instance) (process_{name}{{{_TARGET}}})"
    yield f"sum by (instance) (rate(process_cpu_seconds_total{{{_TARGET}}}[{_WINDOW}]))"
    yield from (_of(f"vllm:{name}") for name in ("cache_config_info", "lora_requests_info"))
    for name in ("sleep_mode", "rl_weight_update"):
        yield f"sum(last_over_time(vllm:{name}_operation_duration_seconds_count{{{_TARGET}}}[{_RANGE}]))"
