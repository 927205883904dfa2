"""The memory that blocks are gathered from and scattered to: an engine's KV cache, by address or as tensors."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from transfer.memory.layout import KVLayout
from transfer.store.refs import StoreError


class BlockMemory(Protocol):
    """KV blocks by number. In a buffer, the regions of a block lie one after the other, in the order of layers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all regions."""

    def gather(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy each block into its buffer of `block_bytes` bytes. The bytes are there when it returns."""

    def scatter(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        """Copy each buffer into its block, layer after layer. The bytes are there when it returns."""

    def pin(self, buffer: memoryview) -> None:
        """Prepare a buffer that lasts for copies to and from the device. Raises StoreError."""

    def unpin(self, buffer: memoryview) -> None:
        """Undo `pin`, before the buffer is freed."""


class Lender(Protocol):
    """Has blocks in the memory that it may take back to use for something else."""

    def borrow(self, keys: Sequence[bytes]) -> Sequence[int]:
        """The blocks of the leading keys that it has. They stay what they are until they are given back."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """Blocks that were borrowed together are not read any more."""


Gather = Callable[[Sequence[bytes], Sequence[memoryview]], int]
"""Copies the blocks of the keys into the buffers. Returns how many: all, or the leading ones."""


def gather_owned(memory: BlockMemory, owned: Mapping[bytes, int]) -> Gather:
    """`owned`: the caller's blocks by their keys. All are copied."""

    def gather(keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        memory.gather([owned[key] for key in keys], into)
        return len(keys)

    return gather


def gather_lent(memory: BlockMemory, lender: Lender) -> Gather:
    """The blocks that `lender` still has are copied. They are lent for no longer than that takes."""

    def gather(keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        if blocks := lender.borrow(keys):
            try:
                memory.gather(blocks, into[: len(blocks)])
            finally:
                lender.give_back(blocks)
        return len(blocks)

    return gather


class Gate:
    """Lets a load write into the memory, until it is shut. After that, nothing more is written."""

    def __init__(self) -> None:
        self._lock, self._is_open = threading.Lock(), True

    @contextlib.contextmanager
    def passing(self) -> Iterator[bool]:
        """While this lasts, it is not shut. False: it was before."""
        with self._lock:
            yield self._is_open

    def shut(self) -> None:
        """Wait for a write that is under way, and let no other one begin; idempotent."""
        with self._lock:
            self._is_open = False


def address_of(buffer: memoryview) -> int:
    """The address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class HostMemory:
    """Blocks of a `KVLayout` on the CPU, by address. The memory must last as long as this object is used."""

    def __init__(self, layout: KVLayout) -> None:
        if layout.device != "cpu":
            raise StoreError(f"memory of {layout.device} is not reached by address")
        self._layout = layout
        self.block_bytes = layout.kv_bytes(1)

    def gather(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        targets = [address_of(buffer) for buffer in into]
        for region, base in enumerate(self._layout.bases):
            for block, target in zip(blocks, targets, strict=True):
                self._move(target + region * self._layout.block_bytes, self._at(base, block))

    def scatter(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        origins = [address_of(buffer) for buffer in sources]
        for region, base in enumerate(self._layout.bases):
            for block, origin in zip(blocks, origins, strict=True):
                self._move(self._at(base, block), origin + region * self._layout.block_bytes)

    def pin(self, buffer: memoryview) -> None:
        return

    def unpin(self, buffer: memoryview) -> None:
        return

    def _at(self, base: int, block: int) -> int:
        if not 0 <= block < self._layout.num_blocks:
            raise StoreError(f"block {block} of {self._layout.num_blocks}")
        return base + block * self._layout.block_bytes

    def _move(self, target: int, source: int) -> None:
        ctypes.memmove(target, source, self._layout.block_bytes)


class TensorMemory:
    """Blocks of contiguous tensors on one device, whose first dimension is the block: one tensor for each region.

    Regions come in the order of layers; where a layer's keys and values lie apart, pass both. `compute_stream`: on
    CUDA, the stream that the engine computes on. Copies have a stream of their own, and wait for what that one was
    given before them.
    """

    def __init__(self, regions: Sequence[Any], compute_stream: Any = None) -> None:
        if any(not region.is_contiguous() or len(region) != len(regions[0]) for region in regions):
            raise StoreError("regions must be contiguous tensors of equally many blocks")
        self._regions = [region.reshape(len(region), -1).view(torch.uint8) for region in regions]
        self.block_bytes = sum(region.shape[1] for region in self._regions)
        self._device = self._regions[0].device
        self._is_cuda = self._device.type == "cuda"
        self._compute = compute_stream
        self._stream = torch.cuda.Stream(self._device) if self._is_cuda else None

    def gather(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        self._copy(blocks, into, to_buffers=True)

    def scatter(self, blocks: Sequence[int], sources: Sequence[memoryview]) -> None:
        self._copy(blocks, sources, to_buffers=False)

    def _copy(self, blocks: Sequence[int], buffers: Sequence[memoryview], to_buffers: bool) -> None:
        if any(not 0 <= block < len(self._regions[0]) for block in blocks):
            raise StoreError(f"blocks {blocks} of {len(self._regions[0])}")
        hosts = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
        if self._compute is not None and self._stream is not None:
            self._stream.wait_stream(self._compute)
        with torch.cuda.stream(self._stream) if self._is_cuda else contextlib.nullcontext():
            begin = 0
            for region in self._regions:
                end = begin + region.shape[1]
                for block, host in zip(blocks, hosts, strict=True):
                    ours, theirs = (host[begin:end], region[block])[:: 1 if to_buffers else -1]
                    ours.copy_(theirs, non_blocking=True)
                begin = end
        if self._stream is not None:
            self._stream.synchronize()

    def pin(self, buffer: memoryview) -> None:
        if self._is_cuda and (code := torch.cuda.cudart().cudaHostRegister(address_of(buffer), buffer.nbytes, 0)):
            raise StoreError(f"cudaHostRegister of {buffer.nbytes} bytes failed: {code}")

    def unpin(self, buffer: memoryview) -> None:
        if self._is_cuda and (code := torch.cuda.cudart().cudaHostUnregister(address_of(buffer))):
            raise StoreError(f"cudaHostUnregister failed: {code}")
