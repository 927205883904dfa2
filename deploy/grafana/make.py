"""The Grafana dashboard: `python -m deploy.grafana.make --write` writes baton.json, which Grafana imports as it is."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh

FILE = Path(__file__).with_name("baton.json")
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
MODEL = 'model_name=~"$model"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph. `queries`: expressions with their legends. `unit`: as Grafana names it. `stacked`: lines add up."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str
    stacked: bool = False


def percentiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Queries for the median and the 99th percentile of one of vLLM's histograms."""
    buckets = f"sum by (le, model_name) (rate({metric}_bucket{{{MODEL}}}{RATE}))"
    return tuple(
        (f"histogram_quantile({share}, {buckets})", f"{{{{model_name}}}} {name}")
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    )


def mean(metric: str, legend: str) -> tuple[str, str]:
    """The query for the mean of one of vLLM's histograms."""
    sums, counts = (f"sum(rate({metric}_{part}{{{MODEL}}}{RATE}))" for part in ("sum", "count"))
    return f"{sums} / {counts}", legend


ROWS: dict[str, tuple[Graph, ...]] = {
    "Requests": (
        Graph(
            "Requests by status",
            "reqps",
            ((f"sum by (status) (rate(ray_baton_requests_total{RATE}))", "{{status}}"),),
            "What clients were answered. 429 is a refusal; 5xx are failures.",
        ),
        Graph(
            "Requests by mode",
            "reqps",
            ((f'sum by (mode) (rate(ray_baton_requests_total{{mode!=""}}{RATE}))', "{{mode}}"),),
            "How requests were placed. One that moved has several modes.",
        ),
        Graph(
            "Requests kept whole, by rule",
            "reqps",
            ((f'sum by (rule) (rate(ray_baton_requests_total{{rule!=""}}{RATE}))', "{{rule}}"),),
            "Requests that were not split, and the rule that says why.",
        ),
        Graph(
            "Ends, by reason",
            "reqps",
            (
                (
                    f"sum by (finished_reason) (rate(ray_vllm_request_success_total{{{MODEL}}}{RATE}))",
                    "{{finished_reason}}",
                ),
            ),
            "Why answers ended.",
        ),
    ),
    "Latency": (
        Graph(
            "Time to first token",
            "s",
            percentiles("ray_vllm_time_to_first_token_seconds"),
            "From the request's arrival until its first token.",
        ),
        Graph(
            "Gap between tokens",
            "s",
            percentiles("ray_vllm_inter_token_latency_seconds"),
            "From a token to the next one.",
        ),
        Graph(
            "Whole answer",
            "s",
            percentiles("ray_vllm_e2e_request_latency_seconds"),
            "From the request's arrival until its last token.",
        ),
        Graph(
            "Where the time goes, on average",
            "s",
            (
                mean("ray_vllm_request_queue_time_seconds", "queue"),
                mean("ray_vllm_request_prefill_time_seconds", "prefill"),
                mean("ray_vllm_request_decode_time_seconds", "decode"),
            ),
            "Time that requests wait, are prefilled and are decoded.",
        ),
        Graph(
            "Time to first token by its parts, on average",
            "s",
            (
                (
                    f"sum by (part) (rate(ray_baton_ttft_seconds_total{{{MODEL}}}{RATE})) / on () group_left () "
                    f"sum(rate(ray_vllm_time_to_first_token_seconds_count{{{MODEL}}}{RATE}))",
                    "{{part}}",
                ),
            ),
            "The parts add up to the whole.",
            stacked=True,
        ),
    ),
    "Handoffs": (
        Graph(
            "Handoffs by outcome",
            "ops",
            (
                (
                    f"sum by (pool, outcome) (rate(ray_baton_handoffs_total{{{MODEL}}}{RATE}))",
                    "{{pool}} {{outcome}}",
                ),
            ),
            "Prefill has landed ones and failed ones, decode received ones and broken ones.",
        ),
        Graph(
            "Gap of the handoff",
            "s",
            percentiles("ray_baton_handoff_gap_seconds"),
            "From the first token of a split answer to the second one, which is decode's first.",
        ),
        Graph(
            "KV that was written while its prompt was computed",
            "percentunit",
            (
                (
                    f'sum by (pool) (rate(ray_baton_handoff_bytes_total{{when="during_prefill", {MODEL}}}{RATE}))'
                    f" / sum by (pool) (rate(ray_baton_handoff_bytes_total{{{MODEL}}}{RATE}))",
                    "{{pool}}",
                ),
            ),
            "The share of KV bytes whose transfer the prefill hides.",
        ),
    ),
    "Work": (
        Graph(
            "Tokens",
            "short",
            (
                (f"sum(rate(ray_vllm_prompt_tokens_total{{{MODEL}}}{RATE}))", "prompt"),
                (f"sum(rate(ray_vllm_generation_tokens_total{{{MODEL}}}{RATE}))", "generated"),
            ),
            "Tokens per second.",
        ),
        Graph(
            "Requests running and waiting",
            "short",
            (
                (f"sum(ray_vllm_num_requests_running{{{MODEL}}})", "running"),
                (f"sum(ray_vllm_num_requests_waiting{{{MODEL}}})", "waiting"),
            ),
            "Over all engines.",
        ),
        Graph(
            "Requests that wait for a place, by class",
            "short",
            ((f"sum by (class) (ray_baton_sessions_queued{{{MODEL}}})", "{{class}}"),),
            "In the session manager, before they are on any replica.",
        ),
        Graph(
            "Sessions on each replica",
            "short",
            (
                (
                    "sum by (deployment, replica) (ray_baton_sessions_running)",
                    "{{deployment}} {{replica}}",
                ),
            ),
            "Sessions that have a part on the replica.",
        ),
        Graph(
            "KV memory in use",
            "percentunit",
            ((f"max by (WorkerId) (ray_vllm_kv_cache_usage_perc{{{MODEL}}})", "{{WorkerId}}"),),
            "The share of each engine's KV blocks that is in use.",
        ),
        Graph(
            "Prompt tokens found in caches",
            "percentunit",
            (
                (
                    f"sum(rate(ray_vllm_prefix_cache_hits_total{{{MODEL}}}{RATE}))"
                    f" / sum(rate(ray_vllm_prefix_cache_queries_total{{{MODEL}}}{RATE}))",
                    "share",
                ),
            ),
            "The share of prompt tokens that engines found in their prefix caches.",
        ),
        Graph(
            "Preemptions",
            "short",
            ((f"sum by (WorkerId) (increase(ray_vllm_num_preemptions_total{{{MODEL}}}{RATE}))", "{{WorkerId}}"),),
            "With `overcommit: 1.0` there are none.",
        ),
    ),
    "Fleet": (
        Graph(
            "Replicas: healthy, and planned",
            "short",
            (
                ("sum by (deployment) (ray_serve_deployment_replica_healthy)", "{{deployment}}"),
                ("max by (pool) (ray_baton_scaling_target)", "{{pool}} planned"),
            ),
            "By deployment. Plans are there with `scaling` in the configuration.",
        ),
        Graph(
            "Changes of size",
            "short",
            (
                (
                    "sum by (pool, direction) (increase(ray_baton_scaling_decisions_total[$__rate_interval]))",
                    "{{pool}} {{direction}}",
                ),
            ),
            "Changed targets of the plan.",
        ),
    ),
}


def panel(graph: Graph) -> timeseries.Panel:
    """The panel of a graph, half as wide as the page."""
    legend = common.VizLegendOptions().show_legend(True).placement(LegendPlacement.BOTTOM)
    built = (
        timeseries.Panel()
        .title(graph.title)
        .description(graph.about)
        .unit(graph.unit)
        .min(0)
        .height(8)
        .span(12)
        .datasource(SOURCE)
        .legend(legend.display_mode(LegendDisplayMode.LIST))
    )
    if graph.stacked:
        built.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    for number, (expression, name) in enumerate(graph.queries):
        built.with_target(prometheus.Dataquery().expr(expression).legend_format(name).ref_id(chr(ord("A") + number)))
    return built


def whole() -> str:
    """The dashboard as Grafana's JSON."""
    built = (
        dashboard.Dashboard("Baton")
        .uid("baton")
        .description("LLM serving with prefill and decode on separate replicas")
        .tags(["baton", "llm", "ray"])
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .datasource(SOURCE)
            .query("label_values(ray_vllm_generation_tokens_total, model_name)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
        )
    )
    for title, graphs in ROWS.items():
        built.with_row(dashboard.Row(title))
        for graph in graphs:
            built.with_panel(panel(graph))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} instead of printing it")
    if parser.parse_args().write:
        FILE.write_text(whole())
    else:
        print(whole(), end="")


if __name__ == "__main__":
    main()
