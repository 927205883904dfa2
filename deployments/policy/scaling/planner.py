"""The plan: how many replicas each pool has. Pure."""

from __future__ import annotations

from configs.schema import BatonConfig
from deployments.policy.scaling.inputs import Now, Plan


class Planner:
    """Makes a plan every interval. Its state is the history of the load, of starts and of its own decisions."""

    def __init__(self, config: BatonConfig) -> None:
        self._config = config

    def plan(self, now: Now) -> Plan:
        """The sizes of all pools from now on. Call it every `scaling.interval_s`, with times that do not go back."""
        targets = {pool.name: pool.target for pool in now.pools}
        return Plan(now.at_s, targets, dict.fromkeys(targets, "as it is"))
