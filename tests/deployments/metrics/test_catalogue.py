"""The names of the metrics: as vLLM and Ray's panels have them, and as the reference page has them."""

from __future__ import annotations

import re
from pathlib import Path

import vllm.v1.metrics.buckets as vllm_buckets

from deployments.metrics import metric
from deployments.metrics.catalogue import METRICS
from deployments.metrics.metric import Kind
from deployments.metrics.page import table
from tests.metrics_asked import asked_by_ray

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"


def test_the_page_has_every_metric_and_no_other() -> None:
    found = re.search(r"<!-- metrics -->\n(.*)<!-- /metrics -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == table(), "run python -m deployments.metrics.page --write"


def test_names_are_unique_and_labels_are_no_ones_else() -> None:
    assert len({each.told for each in METRICS}) == len(METRICS)
    taken = {"deployment", "replica", "application", "WorkerId", "le"}
    assert [each.name for each in METRICS if taken & set(each.labels)] == []


def test_only_histograms_have_buckets_which_grow() -> None:
    assert [each.name for each in METRICS if bool(each.buckets) != (each.kind is Kind.HISTOGRAM)] == []
    assert [each.name for each in METRICS if list(each.buckets) != sorted(set(each.buckets))] == []


def test_what_has_vllms_name_is_vllms() -> None:
    here = Path(vllm_buckets.__file__).parent
    nixl = here.parents[1] / "distributed" / "kv_transfer" / "kv_connector" / "v1" / "nixl" / "stats.py"
    text = (here / "loggers.py").read_text() + nixl.read_text()
    vllms = [each for each in METRICS if each.name.startswith("vllm:")]
    assert len(vllms) > 20
    assert [each.name for each in vllms if f'"{each.name}"' not in text] == []


def test_the_buckets_are_vllms() -> None:
    assert metric.LATENCY_S == vllm_buckets.REQUEST_LATENCY_BUCKETS
    assert metric.FIRST_TOKEN_S == vllm_buckets.TIME_TO_FIRST_TOKEN_BUCKETS
    assert metric.GAP_S == vllm_buckets.INTER_TOKEN_LATENCY_BUCKETS
    assert list(metric.TOKENS) == vllm_buckets.build_1_2_5_buckets(5_000_000)


def test_rays_panels_find_all_that_has_a_meaning_here() -> None:
    asked = asked_by_ray()
    assert len(asked) > 25
    assert asked - {name for each in METRICS for name in each.shown} == set()
