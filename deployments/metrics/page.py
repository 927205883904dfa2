"""The table of docs/reference/metrics.md: `python -m deployments.metrics.page --write` writes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from deployments.metrics.catalogue import METRICS
from deployments.metrics.metric import Kind, Metric

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
_PLACE = re.compile(r"(<!-- metrics -->\n).*(<!-- /metrics -->)", re.DOTALL)
_COMMON = "model_name"


def table() -> str:
    """The table, one row a metric, with the names that Prometheus scrapes."""
    rows = [_row(metric) for metric in METRICS]
    return "\n".join(["| name | type | from | labels | meaning |", "| --- | --- | --- | --- | --- |", *rows]) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels if label != _COMMON)
    name = metric.shown[0].removesuffix("_bucket").removesuffix("_sum") if len(metric.shown) > 1 else metric.shown[0]
    kind = "sum and count" if metric.kind is Kind.SUMS else metric.kind.value
    return f"| `{name}` | {kind} | {metric.source} | {labels} | {metric.help} |"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(_PLACE.sub(lambda found: found[1] + table() + found[2], PAGE.read_text()))
    else:
        print(table(), end="")
