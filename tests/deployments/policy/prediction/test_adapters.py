"""Which replicas have an adapter, and what it takes to load it."""

from __future__ import annotations

import pytest

from deployments.messages import HeldAdapters
from deployments.policy.prediction.adapters import FIRST_GUESS_S, AdapterIndex


def test_replicas_that_report_an_adapter_have_it_until_they_report_otherwise_or_are_gone() -> None:
    index = AdapterIndex()
    for replica_id in ("a", "b"):
        index.apply(replica_id, HeldAdapters(("00000001", "00000002"), 0.2))
    index.apply("c", HeldAdapters())
    assert index.holders("tuned@00000001") == {"a", "b"}
    index.apply("a", HeldAdapters(("00000002",), 0.2))
    index.forget("c")
    assert index.holders("tuned@00000001") == {"b"}
    index.forget("b")
    assert index.holders("tuned@00000001") == set()


def test_a_load_takes_as_long_as_others_took() -> None:
    index = AdapterIndex()
    assert index.load_s == FIRST_GUESS_S
    index.apply("a", HeldAdapters(("00000001",), 2.0))
    index.apply("b", HeldAdapters(("00000001",), 4.0))
    assert index.load_s == pytest.approx(3.0)
