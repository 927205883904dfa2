"""Random operations against a model, with files that break: what is loaded is right, always."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transfer.store.conftest import BLOCK_BYTES, Cache, blocks_file, index_file, keys_of
from tests.transfer.store.test_block_store import got, put
from transfer.store.block_store import BlockStore
from transfer.store.segment import slot_bytes

Make = Callable[..., BlockStore]
PROMPTS = [keys_of(name, 9) for name in range(12)]


def damage(path: Path, chance: random.Random) -> None:
    """Flip a byte of a block or a record, or cut the file of blocks."""
    file = chance.choice([blocks_file(path), index_file(path)])
    size = file.stat().st_size
    if file.suffix == ".blocks" and chance.random() < 0.2:
        os.truncate(file, chance.randrange(size + 1))
        os.truncate(file, max(size - chance.randrange(3) * slot_bytes(BLOCK_BYTES), 0))
    elif size:
        with file.open("r+b") as opened:
            opened.seek(at := chance.randrange(size))
            old = opened.read(1)
            opened.seek(at)
            opened.write(bytes([old[0] ^ 0xFF]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_operations_and_no_wrong_byte(make_store: Make, cache: Cache, tmp_path: Path, seed: int) -> None:
    chance, store, deleted = random.Random(seed), make_store(6, 30), set[bytes]()
    hits = misses = 0
    for _ in range(1500):
        prompt = chance.choice(PROMPTS)[: chance.randrange(1, 10)]
        act = chance.choices(["store", "load", "delete", "promote", "damage", "restart"], [40, 40, 3, 8, 6, 2])[0]
        if act == "store":
            done = put(store, cache, prompt)
            deleted -= set(prompt)
            assert [tier is not None for tier in store.lookup(prompt)] == done
        elif act == "load":
            done = got(store, cache, prompt)  # asserts that the bytes are right
            hits, misses = hits + done.count(True), misses + done.count(False)
            assert not any(is_loaded and key in deleted for key, is_loaded in zip(prompt, done, strict=True))
        elif act == "delete":
            store.delete(prompt)
            deleted |= set(prompt)
        elif act == "promote":
            store.promote(prompt)
        elif act == "damage":
            damage(tmp_path, chance)
        else:
            store.close()
            store = make_store(6, 30)
    assert hits > 500
    assert misses > 100
    assert not store.counters()["disk_errors"] or store.has_disk
