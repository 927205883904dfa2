"""KV memory of numbers, the keys of prompts, and stores over both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer.memory.layout import KVLayout
from transfer.store.block_memory import HostMemory
from transfer.store.block_store import BlockStore
from transfer.store.config import DiskConfig, StoreConfig
from transfer.store.segment import slot_bytes

LAYERS, REGIONS, BLOCKS, REGION_BLOCK_BYTES = 3, 2, 64, 800
BLOCK_BYTES = LAYERS * REGIONS * REGION_BLOCK_BYTES  # over a page: 4800


class Cache:
    """KV blocks in main memory. `memory` is what a store sees of it."""

    def __init__(self) -> None:
        self.array = np.zeros((LAYERS, REGIONS, BLOCKS, REGION_BLOCK_BYTES), dtype=np.uint8)
        base, region = int(self.array.ctypes.data), BLOCKS * REGION_BLOCK_BYTES
        bases = tuple(base + index * region for index in range(LAYERS * REGIONS))
        self.layout = KVLayout(LAYERS, REGIONS, BLOCKS, 8, REGION_BLOCK_BYTES, bases)
        self.memory = HostMemory(self.layout)

    def write(self, block: int, key: bytes) -> None:
        """Put the bytes into a block that only this key has."""
        self.array[:, :, block] = bytes_of(key)

    def has(self, block: int, key: bytes) -> bool:
        return bool((self.array[:, :, block] == bytes_of(key)).all())

    def wipe(self) -> None:
        self.array[:] = 0


def bytes_of(key: bytes) -> np.ndarray:
    shape = (LAYERS, REGIONS, REGION_BLOCK_BYTES)
    seed = int.from_bytes(key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def keys_of(prompt: Any, count: int) -> list[bytes]:
    """The chained keys of a prompt's first blocks."""
    keys, parent = [], b""
    for number in range(count):
        parent = hashlib.sha256(parent + f"{prompt}/{number}".encode()).digest()
        keys.append(parent)
    return keys


def disk_config(path: Path, slots: int, use_nixl: bool = False) -> DiskConfig:
    return DiskConfig(path, slots * slot_bytes(BLOCK_BYTES), use_nixl)


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def make_store(cache: Cache, tmp_path: Path) -> Iterator[Callable[..., BlockStore]]:
    """`make_store(host, disk)`: a store with so many slots in its tiers. It is closed in the end."""
    made: list[BlockStore] = []

    def make(host: int = 0, disk: int = 0, fingerprint: str = "model", use_nixl: bool = False) -> BlockStore:
        config = StoreConfig(fingerprint, host * BLOCK_BYTES, disk_config(tmp_path, disk, use_nixl) if disk else None)
        made.append(BlockStore(cache.memory, config))
        return made[-1]

    yield make
    for store in made:
        store.close()


def blocks_file(path: Path) -> Path:
    """The only segment's file of blocks."""
    (found,) = path.glob("*/segment-*.blocks")
    return found


def index_file(path: Path) -> Path:
    """The only segment's file of records."""
    (found,) = path.glob("*/segment-*.index")
    return found
