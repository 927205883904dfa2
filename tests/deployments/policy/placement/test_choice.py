"""Costs that count as equal."""

from __future__ import annotations

import pytest

from configs.schema import WeightsConfig
from deployments.policy.placement.choice import near_s

WEIGHTS = WeightsConfig(near_s=0.5, near_share=0.1)


@pytest.mark.parametrize(
    ("cost_s", "expected_s"),
    [
        pytest.param(0.0, 0.5, id="nothing"),
        pytest.param(4.0, 0.5, id="a small cost, of which the share is less"),
        pytest.param(5.0, 0.5, id="as much by both"),
        pytest.param(20.0, 2.0, id="a large cost, of which the share is more"),
        pytest.param(-20.0, 2.0, id="a large gain"),
    ],
)
def test_costs_are_near_by_seconds_or_by_share_whichever_is_more(cost_s: float, expected_s: float) -> None:
    assert near_s(cost_s, WEIGHTS) == pytest.approx(expected_s)
