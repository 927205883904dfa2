"""The values of a process's metrics, as Prometheus gets to know them."""

from __future__ import annotations

import pytest

from deployments.metrics.metric import Kind, Metric
from deployments.metrics.registry import Registry

COUNTER = Metric("vllm:tokens", Kind.COUNTER, "ingress", ("model_name", "pool"), "Tokens.")
WAIT = Metric("baton_wait_seconds", Kind.HISTOGRAM, "ingress", ("model_name",), "Waits.", (0.5, 1.0))
BYTES = Metric("baton_bytes", Kind.SUMS, "replica", ("model_name",), "Bytes.")


def test_a_series_is_the_same_for_the_same_labels() -> None:
    registry = Registry(model_name="m", other="not asked for")
    for pool in ("a", "b", "a"):
        registry.value(COUNTER, pool=pool).add(2)
    assert [(each.name, dict(each.labels), each.value, each.grows) for each in registry.samples()] == [
        ("vllm_tokens", {"model_name": "m", "pool": "a"}, 4.0, True),
        ("vllm_tokens", {"model_name": "m", "pool": "b"}, 2.0, True),
    ]


def test_a_label_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError):
        Registry(model_name="m").value(COUNTER)


def test_a_histograms_buckets_add_up_and_hold_their_bounds() -> None:
    registry = Registry(model_name="m")
    for value in (0.2, 0.5, 0.7, 9.0):
        registry.histogram(WAIT).observe(value)
    found = {(each.name, dict(each.labels).get("le")): each.value for each in registry.samples()}
    assert found == {
        ("baton_wait_seconds_bucket", "0.5"): 2,
        ("baton_wait_seconds_bucket", "1.0"): 3,
        ("baton_wait_seconds_bucket", "+Inf"): 4,
        ("baton_wait_seconds_sum", None): pytest.approx(10.4),
        ("baton_wait_seconds_count", None): 4,
    }
    assert {name for name, _ in found} == {shown.removeprefix("ray_") for shown in WAIT.shown}


def test_sums_are_taken_over_and_have_no_buckets() -> None:
    registry = Registry(model_name="m")
    for total in (10.0, 30.0):
        registry.histogram(BYTES).reach(total, 3)
    assert {each.name: each.value for each in registry.samples()} == {"baton_bytes_sum": 30.0, "baton_bytes_count": 3}
