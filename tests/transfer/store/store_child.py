"""A process that stores without end until it is killed: `python store_child.py DIRECTORY SEED`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.transfer.store.conftest import BLOCK_BYTES, Cache, disk_config, keys_of
from transfer.store.block_store import BlockStore
from transfer.store.config import StoreConfig
from transfer.store.refs import chain

SLOTS = 24
CONFIG_HOST_BYTES = 4 * BLOCK_BYTES


def main(directory: Path, seed: int) -> None:
    cache, chance = Cache(), random.Random(seed)
    store = BlockStore(cache.memory, StoreConfig("model", CONFIG_HOST_BYTES, disk_config(directory, SLOTS)))
    for number in range(1 << 30):
        keys = keys_of(chance.randrange(40), chance.randrange(1, 9))
        for block, key in enumerate(keys):
            cache.write(block, key)
        store.store(chain(keys), range(len(keys)))
        if number == 20:
            print("ready", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
