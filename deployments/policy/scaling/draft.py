"""A plan while it is made: targets and reasons, pool by pool. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deployments.messages import Role
from deployments.policy.scaling.inputs import Now, PoolNow, Predicted
from deployments.policy.scaling.reasons import Reason


class Draft:
    """What has been decided so far. `short`: the pool with the largest strain over 1 with the replicas of now.

    `growth`: the load that is expected when a start would be over, as a multiple of now.
    """

    def __init__(self, now: Now, pools: Mapping[str, PoolNow], growth: float) -> None:
        self.now, self.pools, self.growth = now, pools, growth
        self.targets: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.codes: dict[str, Reason] = {}
        self.predicted: dict[str, Predicted] = {}
        self._short: tuple[float, str] = (1.0, "")

    @property
    def short(self) -> str | None:
        """The pool that lacks most; None where none does."""
        return self._short[1] or None

    def settle(self, name: str, size: int, why: str, code: Reason) -> None:
        """A pool gets this size."""
        before = self.pools[name].target
        self.targets[name], self.codes[name] = size, code
        self.reasons[name] = f"{size}: {why}" if size == before else f"{before} -> {size}: {why}"

    def explain(self, name: str, why: str, code: Reason) -> None:
        """The size of a pool stays as it was settled, for another reason."""
        self.settle(name, self.targets[name], why, code)

    def note_given_up(self, name: str) -> None:
        """A start of this pool was given up lately."""
        self.reasons[name] += "; a start was given up, so the pool does not grow"
        self.codes[name] = Reason.CANNOT_PLACE

    def strained(self, name: str, strain: float) -> None:
        """The replicas of now have this strain."""
        self._short = max(self._short, (strain, name), key=lambda each: each[0])

    def note_prefill(self, why: str) -> None:
        """One more reason for the sizes of the pools that prefill."""
        for name, pool in self.pools.items():
            if pool.role is Role.PREFILL:
                self.reasons[name] += f"; {why}"
