"""Digests of the blocks that a fetch moves: of what the source writes, and of what has come to the target.

A write carries one layer of some blocks, and of each the heads that both workers hold: the *window*. Replicas that
split their KV in unlike ways have unlike windows, so a digest covers what one worker writes of a block to one other
worker. Writes end in any order. A block's digest is therefore that of the digests of its layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterable, Sequence
from typing import Any

from transfer.control.handoff import Write
from transfer.memory.digest import digest_of
from transfer.memory.layout import KVLayout

PIECE_BYTES = 8 << 20
"""The most bytes that the channel's thread reads for digests before it does other work; a block at least."""

Window = tuple[int, int]
"""Offset and length in bytes, inside each block of a region."""


class BlockReader:
    """Computes digests of a worker's blocks. `counts`: the channel's counters; `fetch_digest_s` grows."""

    def __init__(self, layout: KVLayout, counts: dict[str, float]) -> None:
        self._layout, self._counts = layout, counts
        self._on_device: DeviceRegions | None = None

    def blocks_at_once(self, layers: int, window: Window) -> int:
        """The number of blocks, of so many layers, whose windows make a piece."""
        return max(1, PIECE_BYTES // (layers * self._layout.regions_per_layer * window[1]))

    def digests(self, layer: int, blocks: Sequence[int], window: Window) -> list[bytes]:
        """One for each block: the digests of its windows in all regions of a layer, one behind the other."""
        begun = time.monotonic()
        regions = [self._windows(layer, region, blocks, window) for region in range(self._layout.regions_per_layer)]
        found = [b"".join(map(digest_of, windows)) for windows in zip(*regions, strict=True)]
        self._counts["fetch_digest_s"] += time.monotonic() - begun
        return found

    def _windows(self, layer: int, region: int, blocks: Sequence[int], window: Window) -> list[memoryview]:
        if self._layout.device != "cpu":
            self._on_device = self._on_device or DeviceRegions.of(self._layout)
            which = (layer - self._layout.layers.start) * self._layout.regions_per_layer + region
            return self._on_device.windows(which, blocks, window)
        skip, length = window
        places = [self._layout.address(layer, block, region) + skip for block in blocks]
        return [memoryview((ctypes.c_char * length).from_address(place)) for place in places]


class DeviceRegions:
    """Regions in a GPU's memory, as tensors of `[blocks, bytes]`. What is read is copied to main memory.

    `stream`: that of these copies. No computation waits for them. None: the tensors are on the CPU.
    """

    def __init__(self, regions: Sequence[Any], stream: Any) -> None:
        self._regions, self._stream = regions, stream

    @classmethod
    def of(cls, layout: KVLayout) -> DeviceRegions:
        """Those of a layout on CUDA."""
        import torch  # only an engine on a GPU comes here

        device = f"{layout.device}:{layout.device_id}"
        regions = [torch.as_tensor(_Region(layout, base), device=device) for base in layout.bases]
        return cls(regions, torch.cuda.Stream(device))

    def windows(self, region: int, blocks: Sequence[int], window: Window) -> list[memoryview]:
        """A copy of the window of each block."""
        import torch  # as above

        skip, length = window
        copied = torch.empty((len(blocks), length), dtype=torch.uint8, pin_memory=self._stream is not None)
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            copied.copy_(self._regions[region][list(blocks), skip : skip + length], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return [memoryview(row) for row in copied.numpy()]


class _Region:
    """A region of a GPU's memory, as torch takes it without a copy."""

    def __init__(self, layout: KVLayout, base: int) -> None:
        shape = (layout.num_blocks, layout.block_bytes)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (base, False), "version": 3}


def block_digest(layers: Iterable[bytes]) -> bytes:
    """Of a block whose layers have these digests, in their order."""
    return digest_of(b"".join(layers))


class WrittenBlocks:
    """What a source has written to one worker, of the borrowed `blocks`. They stay as they are while this is used.

    `blocks_at_once`: the most blocks that one write shall carry.
    """

    def __init__(self, reader: BlockReader, layers: range, window: Window, blocks: Sequence[int]) -> None:
        self._reader, self._layers, self._window, self._blocks = reader, layers, window, blocks
        self._found: dict[tuple[int, int], bytes] = {}  # by layer and block
        self.blocks_at_once = reader.blocks_at_once(1, window)

    def wrote(self, write: Write) -> None:
        """A write has ended well."""
        found = self._reader.digests(write.layer, write.local, self._window)
        self._found |= {(write.layer, block): each for block, each in zip(write.local, found, strict=True)}

    def digests(self) -> tuple[bytes, ...]:
        """One for each block. All of their layers are written."""
        return tuple(block_digest(self._found[layer, block] for layer in self._layers) for block in self._blocks)
