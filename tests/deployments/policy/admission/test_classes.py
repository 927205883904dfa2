"""Priority classes: what the configuration says, and which one a request is in."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import (
    BatchesConfig,
    BatonConfig,
    ClassConfig,
    IngressConfig,
    MockEngineConfig,
    PlacementConfig,
    PoolConfig,
)
from deployments.errors import UnknownClass
from deployments.messages import Reject
from deployments.policy.admission.classes import PriorityClass, PriorityClasses


def configured(batches: BatchesConfig | None = None, **placement: Any) -> PriorityClasses:
    """The classes of a configuration of one pool."""
    ingress = IngressConfig(batches=batches)
    mixed = {"a": PoolConfig(engine=MockEngineConfig())}
    return PriorityClasses.of(BatonConfig(mixed=mixed, ingress=ingress, placement=PlacementConfig(**placement)))


TWO = configured(
    classes={"chat": ClassConfig(ttft_s=2.0, tpot_s=0.1), "batch": ClassConfig(rank=1, weight=0.2, max_queued=9)},
    default_class="batch",
)


def test_without_classes_there_is_one_that_promises_nothing() -> None:
    classes = configured()
    assert classes.names == ("default",)
    assert classes.resolve("") == classes.resolve("default") == PriorityClass("default", ttft_s=None, tpot_s=None)


def test_classes_are_as_configured() -> None:
    assert TWO.names == ("chat", "batch")
    assert TWO.resolve("chat") == PriorityClass("chat", rank=0, ttft_s=2.0, tpot_s=0.1, weight=1.0, max_queued=None)
    assert TWO.resolve("") == PriorityClass("batch", rank=1, weight=0.2, max_queued=9)


def test_batches_have_a_class_of_their_own_below_all_others_unless_one_is_named() -> None:
    alone = configured(BatchesConfig())
    assert [alone.resolve(name).rank for name in alone.names] == [0, 1]
    assert alone.names == ("default", "batch")
    below = configured(BatchesConfig(priority_class="night"), classes={"a": ClassConfig(rank=4)}, default_class="a")
    assert (below.names, below.resolve("night").rank, below.resolve("night").yields) == (("a", "night"), 5, True)
    named = configured(BatchesConfig(priority_class="a"), classes={"a": ClassConfig(rank=4)}, default_class="a")
    assert named.names == ("a",)


def test_an_unknown_class_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownClass, match="priority class 'vip' is none of chat, batch"):
        TWO.resolve("vip")
    assert TWO.refusal("vip") == Reject("priority class 'vip' is none of chat, batch", code="unknown_class")
    assert TWO.refusal("chat") is TWO.refusal("") is None
