"""A choice of replicas, and what a policy must answer to make one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from configs.schema import WeightsConfig
from deployments.fleet.columns import Flags
from deployments.messages import Role
from deployments.policy.placement.field import Field


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of the columns: `owner` writes the answer, `helper` prefills for it (None: the owner prefills itself).

    `cost_s`: what the choice costs all requests together, in seconds. `helper_role`: the role of the helper; decode
    where a decode replica hands over a session that it gives up.
    """

    owner: int
    helper: int | None = None
    cost_s: float = 0.0
    helper_role: Role = Role.PREFILL


class Policy(Protocol):
    """How to choose among the replicas that fit."""

    def pair(self, here: Field, owners: Flags, helpers: Flags) -> Choice | None:
        """A decode and a prefill replica with the same engine; None when no two match. Each has at least one."""

    def alone(self, here: Field, role: Role, owners: Flags) -> Choice:
        """One replica for prefill and decode. `owners` has at least one."""

    def target(self, here: Field, owners: Flags) -> int:
        """The decode replica that takes over a session with its KV cache. `owners` has at least one."""

    def at_least(self, here: Field, role: Role, owners: Flags) -> float:
        """A quick lower bound of what `alone` costs. Infinite where costs cannot be compared with those of a pair."""


def near_s(cost_s: float, weights: WeightsConfig) -> float:
    """How much more than `cost_s` counts as equal to it."""
    return max(weights.near_s, weights.near_share * abs(cost_s))
