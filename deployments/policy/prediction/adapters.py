"""Which replicas have which LoRA adapters, and how long it takes to load one. Pure."""

from __future__ import annotations

from deployments.messages import HeldAdapters

FIRST_GUESS_S = 0.5
"""Seconds of a load while no replica has reported one."""


class AdapterIndex:
    """Learns from what replicas report. A load takes as long as the newest loads of all replicas in the mean."""

    def __init__(self) -> None:
        self._held: dict[str, HeldAdapters] = {}

    def apply(self, replica_id: str, held: HeldAdapters) -> None:
        """A replica has reported what it has."""
        if held.ids or replica_id in self._held:
            self._held[replica_id] = held

    def forget(self, replica_id: str) -> None:
        """A replica is gone; idempotent."""
        self._held.pop(replica_id, None)

    def holders(self, adapter: str) -> frozenset[str]:
        """The replicas that have an adapter. `adapter`: as `checkpoint.adapter.engine_name` makes it."""
        number = adapter.rsplit("@", 1)[-1]
        return frozenset(replica_id for replica_id, held in self._held.items() if number in held.ids)

    @property
    def load_s(self) -> float:
        """The seconds expected of a load."""
        seconds = [held.load_s for held in self._held.values() if held.load_s]
        return sum(seconds) / len(seconds) if seconds else FIRST_GUESS_S
