"""What a store is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transfer.store.eviction import CROSSOVER_BLOCKS


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """`size_bytes` of the disk, for this process alone, in `path`. `use_nixl`: over NIXL's POSIX plugin."""

    path: Path
    size_bytes: int
    use_nixl: bool = False


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A worker's tiers. `host_bytes`: 0 for no host tier.

    `fingerprint` names all that must be equal for KV to be used again: model, weights, dtype, layout, rank and number
    of workers. `crossover_blocks`: see `recompute_cost`.
    """

    fingerprint: str
    host_bytes: int = 0
    disk: DiskConfig | None = None
    crossover_blocks: float = CROSSOVER_BLOCKS
