"""What the tiers count, and which blocks have come and gone."""

from __future__ import annotations

from enum import Enum

COUNTERS = (
    "host_hits",  # blocks loaded
    "disk_hits",
    "misses",  # blocks asked for and not loaded
    "loaded_bytes",
    "load_s",
    "host_stored",  # blocks that came into the tier
    "disk_stored",
    "host_evicted",
    "disk_evicted",
    "not_admitted",  # blocks that were stored in no tier
    "stored_bytes",  # gathered from the engine's memory
    "store_s",
    "digest_failures",
    "disk_errors",
)


class Tier(Enum):
    HOST = "host"
    DISK = "disk"


Changes = dict[tuple[Tier, bytes], bool]  # whether a tier has a block now


class Ledger:
    """Counters by name, and the changes since they were last taken."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._changes: Changes = {}

    def count(self, name: str, amount: float = 1) -> None:
        self.counts[name] += amount

    def added(self, tier: Tier, key: bytes) -> None:
        """A block came into a tier."""
        self._changes[tier, key] = True

    def removed(self, tier: Tier, key: bytes) -> None:
        """A block left a tier."""
        self._changes[tier, key] = False

    def take_changes(self) -> Changes:
        """Which blocks have come (True) or gone (False) since the last call; of several changes the last."""
        taken, self._changes = self._changes, {}
        return taken
