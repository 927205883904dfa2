"""The metrics that Ray's Serve LLM panels ask for, read from the installed Ray."""

from __future__ import annotations

import re
from pathlib import Path

import ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels as panels

_NO_MEANING_HERE = re.compile(
    "ray_vllm_("
    "num_requests_swapped"  # vLLM has none any more
    "|nixl_post_time_seconds_|nixl_num_kv_expired_reqs_"  # of vLLM's own NIXL connector
    "|kv_offload_|external_prefix_cache_"  # nothing is offloaded
    ")"
)


def asked_by_ray() -> set[str]:
    """The names of vLLM's metrics, as Prometheus scrapes them, that have a meaning in Baton."""
    text = Path(panels.__file__).read_text()
    histograms = set(re.findall(r'_histogram_panels\(\s*"(ray_vllm_\w+)"', text))
    series = {f"{name}_{end}" for name in histograms for end in ("bucket", "sum", "count")}
    named = set(re.findall(r"\bray_vllm_\w+", text)) - histograms
    return {name for name in named | series if not _NO_MEANING_HERE.match(name)}
