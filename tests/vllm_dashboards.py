"""What vLLM's own Grafana dashboards ask Prometheus for: the one beside its Prometheus example, and those of its
performance and query statistics (https://docs.vllm.ai/en/stable/examples/observability/). Metrics have the names that
vLLM has outside of Ray, and `$model_name` is the model.
"""

from __future__ import annotations

from collections.abc import Iterator

_MODEL, _WINDOW = '{model_name="$model_name"}', "[$__rate_interval]"
_PERCENTILES = {
    "vllm:e2e_request_latency_seconds": (0.5, 0.9, 0.95, 0.99),
    "vllm:inter_token_latency_seconds": (0.5, 0.9, 0.95, 0.99),
    "vllm:time_to_first_token_seconds": (0.5, 0.9, 0.95, 0.99),
    "vllm:request_prompt_tokens": (0.5, 0.9, 0.99),
}
_MEANS = ("vllm:e2e_request_latency_seconds", "vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds")
_RATES = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:iteration_tokens_total_count",
)
_NOW = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_INCREASES = {
    "vllm:request_prompt_tokens_bucket": "le",
    "vllm:request_generation_tokens_bucket": "le",
    "vllm:request_success_total": "finished_reason",
}


def expressions() -> Iterator[str]:
    """Each kind of expression of each metric."""
    for metric, shares in _PERCENTILES.items():
        for by in ("le", "le, model_name"):
            buckets = f"sum by ({by}) (rate({metric}_bucket{_MODEL}{_WINDOW}))"
            yield buckets
            yield from (f"histogram_quantile({share}, {buckets})" for share in shares)
    for metric in _MEANS:
        sums, counts = (f"{metric}_{part}{_MODEL}{_WINDOW}" for part in ("sum", "count"))
        yield f"rate({sums}) / rate({counts})"
        yield f"sum(increase({sums})) / sum(increase({counts}))"
    for metric in _RATES:
        yield f"rate({metric}{_MODEL}{_WINDOW})"
        yield f"sum by (model_name) (rate({metric}{_MODEL}{_WINDOW}))"
    prompts, ends = (f"sum(rate(vllm:{name}_total{_MODEL}{_WINDOW}))" for name in ("prompt_tokens", "request_success"))
    yield f"{prompts} / {ends}"
    yield from (f"{metric}{_MODEL}" for metric in _NOW)
    for metric, by in _INCREASES.items():
        yield f"sum by ({by}) (increase({metric}{_MODEL}{_WINDOW}))"
