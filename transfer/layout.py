"""A KV cache's layout in memory, and whether two can exchange blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where a worker's KV blocks lie.

    A region is an array of `num_blocks` blocks of `block_bytes` bytes, one behind the other, at `bases[region]`.
    Each layer has `regions_per_layer` of them, in layer order: one where keys and values of a block lie
    together, two where they are apart. `block_size` is in tokens; `fingerprint` names everything else that
    must agree (model, weights, dtype, versions).
    """

    num_layers: int
    regions_per_layer: int
    num_blocks: int
    block_size: int
    block_bytes: int
    bases: tuple[int, ...]
    device: str = "cpu"
    device_id: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if len(self.bases) != self.num_layers * self.regions_per_layer:
            raise ValueError(f"{len(self.bases)} regions for {self.num_layers} layers x {self.regions_per_layer}")

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_bytes * self.regions_per_layer

    def kv_bytes(self, blocks: int) -> int:
        """Bytes of `blocks` blocks in all layers."""
        return blocks * self.num_layers * self.layer_block_bytes

    def index(self, layer: int, block: int, region: int = 0) -> int:
        """Position of a block in the list of all blocks of all regions."""
        return (layer * self.regions_per_layer + region) * self.num_blocks + block


def mismatch(ours: KVLayout, theirs: KVLayout) -> str | None:
    """The first difference that keeps two caches from exchanging blocks, or None when they can."""
    for name in ("fingerprint", "num_layers", "regions_per_layer", "block_size", "block_bytes"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name} differs: {mine!r} here, {other!r} there"
    return None
