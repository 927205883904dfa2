"""A KV cache's layout in memory, and whether two caches can exchange blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from transfer.memory.heads import head_range
from transfer.memory.partition import Partition, overlap

MAX_WORKERS = 1 << 16  # also the maximum number of heads
MAX_INDEX = (1 << 31) - 1  # a data plane numbers its descriptors with 32 bits
MAX_ADDRESS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where a worker's KV blocks lie.

    A region is an array of `num_blocks` blocks of `block_bytes` bytes, one after the other, at address
    `bases[region]`. Each layer has `regions_per_layer` regions, in layer order: one when the keys and values of a
    block lie together, two when they lie apart. `block_size` is in tokens. `facts` name everything else that must
    agree (model, weights, dtype, versions). The worker is number `rank` of the `workers` of its replica. It holds its
    share of the model's `total_heads` KV heads. `heads_first`: inside a block the heads lie one after the other.
    `stages`: the number of the model's layers in each pipeline stage of the replica, and this worker has those of its
    own stage; empty: every worker has all layers. Layers are numbered as in the model.
    """

    num_layers: int
    regions_per_layer: int
    num_blocks: int
    block_size: int
    block_bytes: int
    bases: tuple[int, ...]
    device: str = "cpu"
    device_id: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    rank: int = 0
    workers: int = 1
    total_heads: int = 1
    heads_first: bool = True
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_range()
        if len(self.bases) != self.num_layers * self.regions_per_layer:
            raise ValueError(f"{len(self.bases)} regions for {self.num_layers} layers x {self.regions_per_layer}")
        if self.block_bytes % len(self.heads):
            raise ValueError(f"blocks of {self.block_bytes} bytes for {len(self.heads)} heads")

    def _check_range(self) -> None:
        """Raise ValueError for a layout outside the address space, or one that is too large to index.

        Layouts come over the wire, so no value is trusted.
        """
        counts = (self.num_layers, self.regions_per_layer, self.num_blocks, self.block_size, self.block_bytes)
        if min(*counts, self.workers, self.total_heads) < 1 or max(self.workers, self.total_heads) > MAX_WORKERS:
            raise ValueError("a count that cannot be")
        if not (0 <= self.rank < self.workers and 0 <= self.device_id < MAX_INDEX):
            raise ValueError(f"worker {self.rank} of {self.workers} on device {self.device_id}")
        self._check_stages()
        if self.num_layers * self.regions_per_layer * self.num_blocks > MAX_INDEX:
            raise ValueError(f"more than {MAX_INDEX} blocks in all regions")
        if any(not 0 <= base <= MAX_ADDRESS - self.num_blocks * self.block_bytes for base in self.bases):
            raise ValueError("a region outside the address space")

    def _check_stages(self) -> None:
        """Raise ValueError for stages that the workers cannot have, or a number of layers that is not the stage's."""
        if not self.stages:
            return
        if self.workers % len(self.stages) or min(self.stages) < 1 or sum(self.stages) > MAX_INDEX:
            raise ValueError(f"stages of {self.stages} layers for {self.workers} workers")
        if len(self.layers) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers in worker {self.rank} of stages of {self.stages} layers")

    @property
    def partition(self) -> Partition:
        """How the workers of the replica split its KV."""
        return Partition(self.workers // max(1, len(self.stages)), self.stages)

    @property
    def layers(self) -> range:
        """The layers that this worker has, as the model numbers them."""
        own = self.partition.layers(self.rank)
        return range(self.num_layers) if own is None else own

    @property
    def total_layers(self) -> int:
        """The model's layers."""
        return sum(self.stages) if self.stages else self.num_layers

    @property
    def heads(self) -> range:
        """The KV heads that this worker holds."""
        tensor = self.partition.tensor
        return head_range(self.rank % tensor, tensor, self.total_heads)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one block of one region."""
        return self.block_bytes // len(self.heads)

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_bytes * self.regions_per_layer

    def kv_bytes(self, blocks: int) -> int:
        """Bytes of `blocks` blocks in all of this worker's layers."""
        return blocks * self.num_layers * self.layer_block_bytes

    def index(self, layer: int, block: int, region: int = 0) -> int:
        """The position of a block in the list of all blocks of all regions. `layer`: as the model numbers them."""
        return ((layer - self.layers.start) * self.regions_per_layer + region) * self.num_blocks + block

    def address(self, layer: int, block: int, region: int = 0) -> int:
        """Where a block of a region of a layer begins."""
        which = (layer - self.layers.start) * self.regions_per_layer + region
        return self.bases[which] + block * self.block_bytes

    def window(self, other: KVLayout) -> tuple[int, int]:
        """Offset and length of the heads that `other` holds as well, in bytes inside each of this layout's blocks."""
        return self.window_of(other.heads)

    def window_of(self, heads: range) -> tuple[int, int]:
        """The same of some of the model's heads."""
        begin, end = max(self.heads.start, heads.start), min(self.heads.stop, heads.stop)
        if len(self.heads) == end - begin:
            return 0, self.block_bytes
        return (begin - self.heads.start) * self.head_bytes, (end - begin) * self.head_bytes

    def shared_layers(self, other: Partition, rank: int) -> range:
        """The layers that worker `rank` of a replica of this partition has as well."""
        theirs = other.layers(rank)
        return self.layers if theirs is None else overlap(self.layers, theirs) or range(0)


def mismatch(ours: KVLayout, theirs: KVLayout) -> str | None:
    """The first difference that prevents two caches from exchanging blocks, or None when they can exchange them."""
    for name in sorted(ours.facts.keys() | theirs.facts.keys()):
        mine, other = ours.facts.get(name), theirs.facts.get(name)
        if mine != other:
            return f"{name} differs: {mine!r} here, {other!r} there"
    for name in ("total_layers", "regions_per_layer", "block_size", "total_heads", "head_bytes"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} differs: {getattr(ours, name)!r} here, {getattr(theirs, name)!r} there"
    if not ours.shared_layers(theirs.partition, theirs.rank):
        return f"no layers in common: {ours.layers} here, {theirs.layers} there"
    begin, end = _shared_heads(ours, theirs)
    if begin >= end:
        return f"no heads in common: {ours.heads} here, {theirs.heads} there"
    if ours.heads != theirs.heads and not (ours.heads_first and theirs.heads_first):
        return "unequal tensor parallelism, with a KV layout in which a block's heads do not lie one behind the other"
    return None


def _shared_heads(ours: KVLayout, theirs: KVLayout) -> tuple[int, int]:
    return max(ours.heads.start, theirs.heads.start), min(ours.heads.stop, theirs.heads.stop)
