"""A choice of replicas, and what a policy must answer to make one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from configs.schema import WeightsConfig
from deployments.fleet.columns import Flags
from deployments.policy.placement.field import Field


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of the columns: `owner` writes the answer, `helper` prefills for it (None: the owner prefills itself)."""

    owner: int
    helper: int | None = None


class Policy(Protocol):
    """How to choose among the replicas that fit."""

    def choose(self, here: Field) -> Choice | None:
        """One replica for all (of `here.alone`), or one of `here.pair_owners` and one of `here.helpers`.

        Both of a pair have the same engine. None when there is no way.
        """

    def target(self, here: Field, owners: Flags) -> int:
        """The replica that takes over a session with its KV cache. `owners` has at least one."""


def near_s(cost_s: float, weights: WeightsConfig) -> float:
    """How much more than `cost_s` counts as equal to it."""
    return max(weights.near_s, weights.near_share * abs(cost_s))
