"""What dashboards and alerts ask Prometheus for: Baton's own, Ray's Serve LLM dashboard, and vLLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels as panels
import yaml
from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_serve_llm_grafana_dashboard

from deploy.grafana.make import FILE
from tests import vllm_dashboards, vllm_fleet_dashboards

ROOT = Path(__file__).resolve().parents[1]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
WINDOW = "5m"

NO_MEANING = {
    "num_requests_swapped": "vLLM swaps no requests any more",
    "nixl_post_time_seconds_|nixl_num_kv_expired_reqs_": "of vLLM's own NIXL connector",
    "nixl_num_descriptors_|nixl_num_failed_notifications_|nixl_num_notifications_after_expiry_": "the same",
    "nixl_(xfer_time_seconds|bytes_transferred)_bucket": "writes are summed, and not sorted by their size",
    "nixl_num_failed_transfers_total": "it has the name of Ray's panel, without the ending",
    "kv_offload_|external_prefix_cache_": "nothing is offloaded",
    "prompt_tokens_cached_by_source_": "nothing is offloaded, so there is one tier: `prompt_tokens_cached`",
    'source="external_kv_transfer"': "a prompt counts where it is computed, and not again where decode gets it",
    "vllm_kv_block_": "vLLM samples blocks by an option, and tells of them where its frontend is",
    "num_requests_kv_fetch_by_stage": "of vLLM's connectors that load; `num_requests_waiting_by_reason` has what waits",
    "spec_decode_": "no engine drafts tokens",
    "vllm_estimated_": "vLLM estimates by an option, and tells of it where its frontend is",
    "engine_sleep_state|sleep_mode_operation_": "no engine sleeps",
    "rl_weight_update_": "weights stay as they are while an engine runs",
    "vllm_mm_cache_": "the cache of images and sound is not counted",
    "cache_config_info": "the configuration has it",
    "lora_requests_info": "adapters in a batch are not counted",
    r"\bhttp_request": "vLLM's server of HTTP counts at its own /metrics; through Ray, `baton_requests` counts",
    r"\bprocess_": "of vLLM's server's process; Ray has the figures of its workers",
    "request_max_num_generation_tokens_": "each of a request's `n` answers is counted by itself",
    "iteration_tokens_total_": "vLLM counts steps where its frontend is, and steps are made elsewhere",
}
"""Parts of metrics' names that have no meaning in Baton, and why."""
NONE_OF_IT = {
    "num_preemptions": "no engine preempts with `overcommit: 1.0`",
    r'status=~"5': "no request fails",
    'status="429"': "no request is refused",
    'finished_reason="error"': "the same of answers",
    r'outcome=~"failed\|broken"': "no handoff fails",
}
"""What counts faults. Where there were none, there is no such series: Ray shows no counter before it was counted up."""


def asked_by_ray() -> set[str]:
    """The names of vLLM's metrics, as Prometheus scrapes them, that have a meaning in Baton."""
    text = Path(panels.__file__).read_text()
    histograms = set(re.findall(r'_histogram_panels\(\s*"(ray_vllm_\w+)"', text))
    series = {f"{name}_{end}" for name in histograms for end in ("bucket", "sum", "count")}
    named = set(re.findall(r"\bray_vllm_\w+", text)) - histograms
    return {name for name in named | series if has_meaning(name)}


def has_meaning(expression: str) -> bool:
    """Whether all that an expression asks for has a meaning in Baton."""
    return not any(re.search(pattern, expression) for pattern in NO_MEANING)


def is_expected(expression: str) -> bool:
    """Whether an expression has an answer where there is load and no fault."""
    return has_meaning(expression) and not any(re.search(pattern, expression) for pattern in NONE_OF_IT)


def rules() -> list[dict[str, Any]]:
    """Baton's alerts."""
    found: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return found


def measured(alert: str) -> str:
    """What an alert's expression compares with a number: it is there when the alert does not fire, too."""
    if inside := re.fullmatch(r"absent\((.*)\)", alert.strip()):
        return inside[1]
    compared = re.fullmatch(r"(.*)\s(?:>|==)\s[\d.]+", alert.strip(), re.DOTALL)
    assert compared is not None, alert
    return compared[1]


def shown(dashboard: str) -> Iterator[str]:
    """The expressions of a Grafana dashboard's JSON, with those of rows that are folded."""
    waiting = list(json.loads(dashboard)["panels"])
    while waiting:
        panel = waiting.pop()
        waiting += panel.get("panels", [])
        yield from (target["expr"] for target in panel.get("targets", []))


def filled(expression: str, model: str = ".*") -> str:
    """An expression as Grafana sends it: every time is `WINDOW`, and every variable for a label matches anything.

    `model`: the model, where an expression wants exactly one.
    """
    expression = re.sub(r"\$(interval|__rate_interval|__range)\b", WINDOW, expression)
    return re.sub(r"\$\w+", ".*", expression.replace('="$model_name"', f'="{model}"'))


def questions(model: str) -> dict[str, list[str]]:
    """Every expression by where it is from."""
    return {
        "Baton's dashboard": [filled(each) for each in shown(FILE.read_text())],
        "Baton's alerts": [measured(rule["expr"]) for rule in rules()],
        "Ray's Serve LLM dashboard": [filled(each) for each in shown(generate_serve_llm_grafana_dashboard()[0])],
        "vLLM's dashboards": [
            filled(each.replace("vllm:", "ray_vllm_"), model) for each in vllm_dashboards.expressions()
        ],
        "vLLM's dashboards of a fleet": [
            filled(each.replace("vllm:", "ray_vllm_"), model) for each in vllm_fleet_dashboards.expressions()
        ],
    }
