"""Store the KV of a prompt's blocks, forget it, and load it again: `python -m transfer.store.example DIRECTORY`."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from transfer.store.block_memory import TensorMemory
from transfer.store.block_store import BlockStore
from transfer.store.config import DiskConfig, StoreConfig
from transfer.store.refs import chain


def main(directory: Path) -> None:
    """Two stores, one after the other: the second finds on the disk what the first has stored."""
    layers = [torch.randn(16, 2, 8, 32) for _ in range(4)]  # 16 blocks of 2 heads x 8 tokens x 32 in each of 4 layers
    memory = TensorMemory(layers)
    keys = [hashlib.sha256(f"block {number} of a prompt".encode()).digest() for number in range(3)]
    config = StoreConfig("a model, its weights, dtype and layout", disk=DiskConfig(directory, 64 << 20))

    first = BlockStore(memory, config)
    print("stored:", first.store(chain(keys), [5, 6, 7]))
    before = [layer[5:8].clone() for layer in layers]
    first.close()

    for layer in layers:
        layer.zero_()
    second = BlockStore(memory, config)
    print("found:", [tier.value for tier in second.lookup(keys) if tier])
    print("loaded:", second.load(keys, [0, 1, 2]))
    print("equal:", all(torch.equal(layer[:3], kept) for layer, kept in zip(layers, before, strict=True)))
    second.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
