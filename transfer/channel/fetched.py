"""A worker's record of one of its fetches: what it asked for, what the sources said, and what of it came unharmed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from transfer.channel.digests import BlockReader, Window, block_digest
from transfer.memory.heads import head_range
from transfer.memory.layout import KVLayout
from transfer.memory.partition import Partition, partition_of, sources


@dataclass(frozen=True, slots=True)
class Part:
    """What one source writes: these layers, and this window of the target's blocks."""

    layers: range
    window: Window


def part_of(ours: KVLayout, peers: Partition, rank: int) -> Part:
    """What worker `rank` of a replica that splits its KV so writes into this worker's memory."""
    heads = head_range(rank % peers.tensor, peers.tensor, ours.total_heads)
    return Part(ours.shared_layers(peers, rank), ours.window_of(heads))


class FetchedBlocks:
    """A fetch of `request_id` into `blocks`, in the order of the prompt.

    `parts`: of the workers that write it, by endpoint. `found`, `digests`: what they have said. `late_at`: when the
    request waits no longer for its end, and `begun`, both by the monotonic clock. `good`: the leading blocks that are
    known to be as they were written. `is_corrupt`: one is not. A block behind that one is of no use.
    """

    def __init__(
        self, request_id: str, layout: KVLayout, peers: Sequence[str], blocks: Sequence[int], late_at: float
    ) -> None:
        self.request_id, self.blocks, self.late_at, self.begun = request_id, blocks, late_at, time.monotonic()
        partition = partition_of(peers)
        ranks = sources(layout.rank, layout.partition, partition, layout.total_heads)
        self.parts = {peers[rank]: part_of(layout, partition, rank) for rank in ranks}
        self.found = dict.fromkeys(self.parts, 0)
        self.digests: dict[str, tuple[bytes, ...]] = dict.fromkeys(self.parts, ())
        self.good, self.is_corrupt = 0, False

    @property
    def came(self) -> int:
        """The number of leading blocks of which all parts have come. Of a fetch that broke, none counts."""
        return min(len(self.blocks), *self.found.values())

    def compare(self, reader: BlockReader) -> bool:
        """Compare the next piece of what came with its digests. Returns whether that was the last."""
        sizes = [reader.blocks_at_once(len(part.layers), part.window) for part in self.parts.values()]
        piece = self.blocks[self.good : min(self.came, self.good + min(sizes))]
        right = min(self._right(reader, endpoint, piece) for endpoint in self.parts)
        self.good += right
        self.is_corrupt = right < len(piece)
        return self.is_corrupt or self.good == self.came

    def _right(self, reader: BlockReader, endpoint: str, piece: Sequence[int]) -> int:
        """How many of these blocks, from the first on, have the bytes that one source wrote."""
        part, told = self.parts[endpoint], self.digests[endpoint][self.good :]
        layers = [reader.digests(layer, piece, part.window) for layer in part.layers]
        found = [block_digest(each) for each in zip(*layers, strict=True)]
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, told, strict=False)))
