"""Priority classes: what the configuration says, and which one a request is in."""

from __future__ import annotations

import pytest

from configs.schema import ClassConfig, PlacementConfig
from deployments.errors import UnknownClass
from deployments.messages import Reject
from deployments.policy.admission.classes import PriorityClass, PriorityClasses

TWO = PriorityClasses.of(
    PlacementConfig(
        classes={"chat": ClassConfig(ttft_s=2.0, tpot_s=0.1), "batch": ClassConfig(rank=1, weight=0.2, max_queued=9)},
        default_class="batch",
    )
)


def test_without_classes_there_is_one_that_promises_nothing() -> None:
    classes = PriorityClasses.of(PlacementConfig())
    assert classes.names == ("default",)
    assert classes.resolve("") == classes.resolve("default") == PriorityClass("default", ttft_s=None, tpot_s=None)


def test_classes_are_as_configured() -> None:
    assert TWO.names == ("chat", "batch")
    assert TWO.resolve("chat") == PriorityClass("chat", rank=0, ttft_s=2.0, tpot_s=0.1, weight=1.0, max_queued=None)
    assert TWO.resolve("") == PriorityClass("batch", rank=1, weight=0.2, max_queued=9)


def test_an_unknown_class_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownClass, match="priority class 'vip' is none of chat, batch"):
        TWO.resolve("vip")
    assert TWO.refusal("vip") == Reject("priority class 'vip' is none of chat, batch", code="unknown_class")
    assert TWO.refusal("chat") is TWO.refusal("") is None
